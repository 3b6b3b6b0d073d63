"""Settings from outside the command line: flag, then ``UMA_*`` variable, then file, then default.

``config.toml`` holds ``name = value`` lines with the options' names, such as ``budget = "24GiB"``;
the variable of ``prefill-step-size`` is ``UMA_PREFILL_STEP_SIZE``.
"""

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from uma.errors import UsageError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Setting(Generic[T]):
    """A value, and where it came from: the flag, the variable, ``config.toml`` or ``default``."""

    value: T
    origin: str


def read_config(path: Path, known: Collection[str]) -> dict[str, str]:
    """The settings of a ``config.toml`` as text, by name with dashes; none if there is no file.

    Raises:
        UsageError: If the file cannot be read, is no TOML, or has a name that is not ``known`` or
            a value that is neither text, number nor boolean.
    """
    import tomllib

    try:
        with path.open("rb") as file:
            rows = tomllib.load(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {error}; correct the file or remove it") from None
    settings: dict[str, str] = {}
    for key, value in rows.items():
        name = key.replace("_", "-")
        if name not in known:
            raise UsageError(f"{path}: unknown setting {key!r}; known: {', '.join(sorted(known))}")
        if not isinstance(value, str | int | float):
            raise UsageError(f"{path}: {key} must be text, a number, true or false, got {value!r}")
        settings[name] = str(value).lower() if isinstance(value, bool) else str(value)
    return settings


def setting(
    name: str,
    flag: T | None,
    default: T,
    parse: Callable[[str], T],
    *,
    config: Mapping[str, str],
    environ: Mapping[str, str] = os.environ,
) -> Setting[T]:
    """The value in force of one option; an empty variable counts as unset.

    Raises:
        UsageError: If ``parse`` refuses the text with ``ValueError``; the message names its origin.

    >>> setting("context", None, 4096, int, config={"context": "8192"}, environ={})
    Setting(value=8192, origin='config.toml')
    """
    if flag is not None:
        return Setting(flag, f"--{name}")
    variable = "UMA_" + name.upper().replace("-", "_")
    for text, origin in ((environ.get(variable), variable), (config.get(name), "config.toml")):
        if text:
            try:
                return Setting(parse(text), origin)
            except ValueError as error:
                raise UsageError(f"{origin}, {name}: {error}") from None
    return Setting(default, "default")


def parse_switch(text: str) -> bool:
    """A boolean as people write it.

    >>> parse_switch("on"), parse_switch("FALSE")
    (True, False)
    """
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"{text!r} is neither on nor off; write true or false")
