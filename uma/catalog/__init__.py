"""The shipped facts: chips, Macs, graphics cards, other unified-memory machines, models.

Rows of ``uma/data/*.csv``, read on first use; what was observed of machines and programs is in
``uma.catalog.observed``. A row's fields are its file's columns; where each number comes from stands
in the row, and ``uma/data/README.md`` says how the files were made. Names are matched by their
words and numbers: ``llama-3-70b``, ``Llama 3 70B`` and ``llama3:70b`` are one. Rows of machines are
read by words too: those alone whose lines have all of them, which takes far less than every row.
"""

import csv
import json
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from uma.catalog.rows import Basis, Chip, Gpu, Mac, Model, ModelConfig, Repository, UnifiedMachine
from uma.errors import UnknownName
from uma.units import GB

__all__ = [
    "DATA",
    "TUNING",
    "Basis",
    "Chip",
    "Gpu",
    "Mac",
    "Model",
    "ModelConfig",
    "Repository",
    "UnifiedMachine",
    "aliases",
    "bytes_per_s",
    "chips",
    "find_chips",
    "find_model",
    "find_repository",
    "gpus",
    "has_words",
    "ids_of",
    "macs",
    "model_config",
    "model_names",
    "models",
    "nearest",
    "read_rows",
    "repositories",
    "repositories_of",
    "short_name",
    "unified_machines",
    "words",
]

DATA = Path(__file__).parent.parent / "data"

_MAKERS = re.compile(r"^(meta|c4ai|nvidia|ai21)-")
TUNING = re.compile(r"-(instruct|it|chat|hf|bf16|qat)(?=-|$)")
_VERSION = re.compile(r"-(v\d+(\.\d+)?|\d{2}-\d{4}|\d{4})$")


def read_rows(name: str, row: Any, lines: Iterable[str] | None = None) -> tuple[Any, ...]:
    """The rows of the file ``name``, or of some of its ``lines``, as instances of ``row``."""
    columns = _columns(name, row)
    return tuple(
        row(*[convert(cells[i]) if convert else cells[i] for i, convert in columns])
        for cells in csv.reader(_lines(name)[1:] if lines is None else lines)
    )


@cache
def _columns(name: str, row: Any) -> list[tuple[int, Callable[[str], Any] | None]]:
    """For each field of ``row`` its column in the file, and what converts the text there."""
    read: dict[Any, Callable[[str], Any]] = {
        int: int,
        bool: lambda text: text == "1",
        int | None: lambda text: int(text) if text else None,
        float | None: lambda text: float(text) if text else None,
        tuple[int, ...]: lambda text: tuple(map(int, filter(None, text.split("|")))),
    }
    names = _lines(name)[0].rstrip().split(",")
    return [(names.index(field), read.get(kind)) for field, kind in row.__annotations__.items()]


@cache
def _lines(name: str) -> tuple[str, ...]:
    """The lines of a file, its columns' names first: each is one row, and few are needed whole."""
    with open(DATA / name, encoding="utf-8", newline="") as file:
        next(file)  # a comment
        return tuple(file)


@cache
def _lines_by(name: str, place: int) -> dict[str, list[str]]:
    """The lines of a file by a cell in lower case, where nothing before its end is quoted."""
    found: dict[str, list[str]] = {}
    for line in _lines(name)[1:]:
        found.setdefault(line.split(",", place + 1)[place].lower(), []).append(line)
    return found


def _with_words(name: str, row: type[Any], said: tuple[str, ...]) -> tuple[Any, ...]:
    """The rows whose lines have all of these words, in lower case; every row without any."""
    lines = (line for line in _lines(name)[1:] if all(word in line.lower() for word in said))
    return read_rows(name, row, lines if said else None)


@cache
def chips(*with_words: str) -> tuple[Chip, ...]:
    return _with_words("chips.csv", Chip, with_words)


@cache
def macs(*with_words: str) -> tuple[Mac, ...]:
    return _with_words("macs.csv", Mac, with_words)


@cache
def gpus(*with_words: str) -> tuple[Gpu, ...]:
    return _with_words("gpus.csv", Gpu, with_words)


@cache
def unified_machines(*with_words: str) -> tuple[UnifiedMachine, ...]:
    return _with_words("unified.csv", UnifiedMachine, with_words)


@cache
def models() -> tuple[Model, ...]:
    return read_rows("models.csv", Model)


@cache
def repositories() -> tuple[Repository, ...]:
    return read_rows("repositories.csv", Repository)


@cache
def repositories_of(hf_id: str) -> tuple[Repository, ...]:
    """Those made from the model with that hub id."""
    lines = _lines_by("repositories.csv", 1).get(hf_id.lower(), ())
    return read_rows("repositories.csv", Repository, lines)


def find_repository(repo: str) -> Repository | None:
    """The row of that repository, whatever the case of its letters."""
    lines = _lines_by("repositories.csv", 0).get(repo.lower(), ())
    return next(iter(read_rows("repositories.csv", Repository, lines)), None)


def bytes_per_s(gb_per_s: float) -> int:
    """A bandwidth as vendors print it, in bytes: GB is 10^9."""
    return round(gb_per_s * GB)


def words(name: str) -> tuple[str, ...]:
    """The words and numbers of a name, in lower case.

    >>> words("llama3.1:8b") == words("Llama 3.1 8B")
    True
    """
    return tuple(re.findall(r"\d+(?:\.\d+)?|[a-z]+", name.lower()))


def has_words(name: str, text: str) -> bool:
    """Whether each part of ``text`` between spaces stands in ``name``, its words in a row.

    >>> has_words("Qwen2.5-Coder-7B", "coder qwen2.5"), has_words("Qwen2.5-3B", "qwen3")
    (True, False)
    """
    whole = words(name)

    def stands(part: tuple[str, ...]) -> bool:
        starts = range(len(whole) - len(part) + 1)
        return any(whole[i : i + len(part)] == part for i in starts)

    return all(stands(words(part)) for part in text.split())


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The ``count`` most similar of ``known``, best first."""
    from difflib import get_close_matches

    plain = {known_name.lower(): known_name for known_name in known}
    found = get_close_matches(name.lower(), plain, n=count, cutoff=0.0)
    return [plain[match] for match in found]


def find_chips(
    name: str, gpu_cores: int | None = None, memory_gib: int | None = None
) -> tuple[Chip, ...]:
    """The bins of the chip ``name`` (``M4 Max`` or ``Apple M4 Max``) that have what is given.

    Raises:
        UnknownName: If there is no such chip, or it has no such bin.
    """
    wanted = words(re.sub(r"(?i)^apple\s+", "", name))
    bins = [chip for chip in chips(*wanted) if words(chip.chip) == wanted]
    if not bins:
        close = ", ".join(nearest(name, {chip.chip for chip in chips()}))
        raise UnknownName(f"no chip is called {name!r}; nearest: {close}")
    found = tuple(
        chip
        for chip in bins
        if gpu_cores in (None, chip.gpu_cores)
        and (memory_gib is None or memory_gib in chip.memory_gib)
    )
    if not found:
        known = "; ".join(f"{c.gpu_cores} GPU cores, {c.memory_gib} GiB" for c in bins)
        raise UnknownName(f"no {name} was sold like that; known: {known}")
    return found


@cache
def find_model(hf_id: str) -> Model | None:
    """The row of the model with that hub id, whatever the case of its letters."""
    lines = _lines_by("models.csv", 0).get(hf_id.lower(), ())
    return next(iter(read_rows("models.csv", Model, lines)), None)


def model_config(model: Model) -> ModelConfig:
    """The shipped ``config.json`` of ``model``, with the keys that are its own."""
    values = json.loads((DATA / "models" / f"{model.config}.json").read_text(encoding="utf-8"))
    for pair in model.own_keys.split():
        key, _, value = pair.partition("=")
        values.get("text_config", values)[key] = int(value)
    return ModelConfig(
        values=values,
        basis=model.config_basis,
        source=values.pop("_source"),
        note=values.pop("_note", ""),
    )


@cache
def aliases() -> dict[tuple[str, ...], tuple[str, ...]]:
    """Hub ids by the words of a name; several ids where the name alone does not decide.

    Names follow from the hub ids: ``meta-llama/Meta-Llama-3-70B-Instruct`` is also
    ``llama-3-70b``. A shortened name never takes one that is another model's own. ``aliases.csv``
    adds only what no rule gives, such as ``llama3`` for the 8B one.
    """
    found: dict[tuple[str, ...], tuple[str, ...]]
    found = {words(alias): (hf_id,) for alias, hf_id in _written_aliases().items()}
    for level in range(4):
        added: dict[tuple[str, ...], tuple[str, ...]] = {}
        for model in models():
            key = words(_forms(model.hf_id)[level])
            added[key] = tuple(dict.fromkeys((*added.get(key, ()), model.hf_id)))
        found = added | found
    return found


def _written_aliases() -> dict[str, str]:
    lines = _lines_by("aliases.csv", 0)
    return {alias: line.split(",")[1] for alias, (line,) in lines.items()}


@cache
def ids_of(name: tuple[str, ...]) -> tuple[str, ...]:
    """What ``aliases`` has for one name, without working out those of all models for it alone."""
    if aliases.cache_info().currsize:
        return aliases().get(name, ())
    for alias, hf_id in _written_aliases().items():
        if all(map(alias.__contains__, name)) and words(alias) == name:
            return (hf_id,)
    lines = _lines_by("models.csv", 0)
    like = [key for key in lines if all(map(key.__contains__, name))]
    for level in range(4):
        found = [key for key in like if words(_forms(key)[level]) == name]
        if found:
            return tuple(lines[key][0].partition(",")[0] for key in found)
    return ()


def _forms(hf_id: str) -> tuple[str, str, str, str]:
    """A model's name in full, without its maker, without what it was tuned for, undated."""
    full = hf_id.partition("/")[2].lower()
    made = _MAKERS.sub("", full)
    tuned = TUNING.sub("", made)
    return full, made, tuned, _VERSION.sub("", tuned)


def short_name(model: Model) -> str:
    """The shortest alias that means ``model`` and no other.

    >>> short_name(find_model("meta-llama/Meta-Llama-3-70B-Instruct"))
    'llama-3-70b'
    """
    forms = reversed(_forms(model.hf_id))
    return next(form for form in forms if aliases()[words(form)] == (model.hf_id,))


@cache
def model_names() -> tuple[str, ...]:
    """Every model's shortest name, then the names that hubs know models by."""
    public = [model.hf_id for model in models()] + [row.repo for row in repositories()]
    names = [short_name(model) for model in models()]
    return tuple(dict.fromkeys(names + [name.partition("/")[2] for name in public]))
