"""Settings from outside the command line: flag, then ``UMA_*`` variable, then file, then default.

``config.toml`` holds ``name = value`` lines with the options' names, such as ``budget = "24GiB"``;
the variable of ``prefill-step-size`` is ``UMA_PREFILL_STEP_SIZE``.
"""

from collections.abc import Collection
from pathlib import Path

from uma.errors import UsageError


def read_config(path: Path, known: Collection[str]) -> dict[str, str | list[str]]:
    """The settings of a ``config.toml`` as text, by name with underscores; none without a file.

    ``known`` are the names that may occur, with dashes; both spellings are read.

    Raises:
        UsageError: If the file cannot be read, is no TOML, or has a name that is not ``known`` or
            a value that is neither text, number nor boolean.
    """
    try:
        if not path.is_file():
            return {}
        import tomllib

        with path.open("rb") as file:
            rows = tomllib.load(file)
    except OSError as error:
        raise UsageError(
            f"settings cannot be read: {error}; XDG_CONFIG_HOME names another folder for them"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: {error}; correct the file or remove it") from None
    settings: dict[str, str | list[str]] = {}
    for key, value in rows.items():
        name = key.replace("_", "-")
        if name not in known:
            raise UsageError(f"{path}: unknown setting {key!r}; known: {', '.join(sorted(known))}")
        texts = [_text(one) for one in (value if isinstance(value, list) else [value])]
        if None in texts:
            raise UsageError(f"{path}: {key} must be text, a number, true or false, got {value!r}")
        found = [text for text in texts if text is not None]
        settings[name.replace("-", "_")] = found if isinstance(value, list) else found[0]
    return settings


def _text(value: object) -> str | None:
    if not isinstance(value, str | int | float):
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)
