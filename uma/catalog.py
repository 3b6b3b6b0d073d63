"""The shipped facts: chips, Macs, graphics cards, other unified-memory machines, models.

Rows of ``uma/data/*.csv``, read on first use. A row's fields are its file's columns; where each
number comes from stands in the row, and ``uma/data/README.md`` says how the files were made.
Names are matched by their words and numbers: ``llama-3-70b``, ``Llama 3 70B`` and ``llama3:70b``
are one.
"""

import csv
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

from uma.errors import UnknownName
from uma.units import GB

DATA = Path(__file__).parent / "data"

_MAKERS = re.compile(r"^(meta|c4ai|nvidia|ai21)-")
TUNING = re.compile(r"-(instruct|it|chat|hf|bf16|qat)(?=-|$)")
_VERSION = re.compile(r"-(v\d+(\.\d+)?|\d{2}-\d{4}|\d{4})$")

Basis = Literal["exact", "transcribed", "derived"]
"""Of a ``config.json``: a copy, some of its keys typed in, or made from published shapes."""


@dataclass(frozen=True, slots=True)
class Chip:
    """One bin of an Apple chip. ``None`` is not known; TFLOPS are dense."""

    chip: str
    bin: str
    year: int
    cpu_super_cores: int | None
    cpu_performance_cores: int | None
    cpu_efficiency_cores: int | None
    cpu_cores: int | None
    gpu_cores: int | None
    bandwidth_gb_per_s: float | None
    bandwidth_basis: str
    memory_gib: tuple[int, ...]
    memory_type: str
    gpu_clock_mhz: int | None
    fp32_tflops: float | None
    fp16_tflops: float | None
    neural_accelerators: bool
    neural_fp16_tflops: float | None
    source: str
    confidence: str
    note: str


@dataclass(frozen=True, slots=True)
class Mac:
    """One Mac with one amount of memory; several core counts where it was sold with each."""

    model: str
    year: str
    chip: str
    cpu_cores: tuple[int, ...]
    gpu_cores: tuple[int, ...]
    memory_gib: int
    price_usd: int | None
    price_kind: str
    ssd_gb: int | None
    ssd_read_gb_per_s: float | None
    thunderbolt: str
    max_power_w: int | None
    idle_power_w: int | None
    sold_new: str
    source: str
    note: str


@dataclass(frozen=True, slots=True)
class Gpu:
    """A discrete card. ``memory_mib`` is what its driver reports, where that is known.

    ``bf16_tflops`` accumulates in float32, at half the rate of ``fp16_tflops`` on consumer cards.
    """

    name: str
    vendor: str
    kind: str
    year: int
    memory_gb: int
    memory_mib: int | None
    bandwidth_gb_per_s: float | None
    memory_type: str
    fp16_tflops: float | None
    bf16_tflops: float | None
    fp32_tflops: float | None
    fp8: bool
    fp4: bool
    fp8_tflops: float | None
    fp4_tflops: float | None
    pcie_gen: int | None
    pcie_lanes: int | None
    pcie_gb_per_s: float | None
    nvlink_gb_per_s: float | None
    tdp_w: int | None
    price_usd: int | None
    price_kind: str
    source: str
    note: str


@dataclass(frozen=True, slots=True)
class UnifiedMachine:
    """A machine, not a Mac, whose GPU and CPU share one memory."""

    name: str
    vendor: str
    year: int
    chip: str
    memory_gib: int | None
    memory_type: str
    bandwidth_gb_per_s: float | None
    gpu_usable_gib: float | None
    gpu_limit_note: str
    fp16_tflops: float | None
    power_w: int | None
    price_usd: int | None
    price_kind: str
    os: str
    source: str
    confidence: str
    note: str


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """A GPU working set that a Mac reported.

    ``macos`` is ``15`` (or older), ``26``, ``any`` or not known; ``exact`` if it was printed to
    the byte; ``default`` unless the user had overridden it.
    """

    memory_gib: int
    chip: str
    macos: str
    reported: str
    working_set_bytes: int
    exact: bool
    default: bool
    source: str
    note: str


@dataclass(frozen=True, slots=True)
class Model:
    """An open-weight model; ``config`` names its file in ``data/models``.

    ``parameters`` counts the text decoder from its shapes, ``parameters_hf`` what the hub states.
    """

    hf_id: str
    family: str
    model_type: str
    parameters: int | None
    parameters_hf: int | None
    active_parameters: int | None
    vendor_active_b: float | None
    release_date: str
    config: str
    config_basis: Basis
    source: str
    confidence: str
    note: str


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository of MLX weights that a source names; ``hf_id`` is the model it was made from.

    ``bits`` is 16 for an unquantized one, and None where no one width describes it.
    """

    repo: str
    hf_id: str
    bits: int | None
    mode: str
    size_bytes: int | None
    source: str
    note: str


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The keys of a ``config.json`` as shipped, how sure they are, and where they are from."""

    values: dict[str, Any]
    basis: Basis
    source: str
    note: str


def _read(name: str, row: type[Any]) -> tuple[Any, ...]:
    """The rows of the file ``name``, whose first line is a comment, as instances of ``row``."""
    read: dict[Any, Callable[[str], Any]] = {
        int: int,
        bool: lambda text: text == "1",
        int | None: lambda text: int(text) if text else None,
        float | None: lambda text: float(text) if text else None,
        tuple[int, ...]: lambda text: tuple(map(int, filter(None, text.split("|")))),
    }
    columns = [(field.name, read.get(field.type, str)) for field in fields(row)]
    with open(DATA / name, encoding="utf-8", newline="") as file:
        next(file)
        return tuple(
            row(*(convert(line[column]) for column, convert in columns))
            for line in csv.DictReader(file)
        )


@cache
def chips() -> tuple[Chip, ...]:
    return _read("chips.csv", Chip)


@cache
def macs() -> tuple[Mac, ...]:
    return _read("macs.csv", Mac)


@cache
def gpus() -> tuple[Gpu, ...]:
    return _read("gpus.csv", Gpu)


@cache
def unified_machines() -> tuple[UnifiedMachine, ...]:
    return _read("unified.csv", UnifiedMachine)


@cache
def working_sets() -> tuple[WorkingSet, ...]:
    return _read("working_set.csv", WorkingSet)


@cache
def models() -> tuple[Model, ...]:
    return _read("models.csv", Model)


@cache
def repositories() -> tuple[Repository, ...]:
    return _read("repositories.csv", Repository)


def bytes_per_s(gb_per_s: float) -> int:
    """A bandwidth as vendors print it, in bytes: GB is 10^9."""
    return round(gb_per_s * GB)


def words(name: str) -> tuple[str, ...]:
    """The words and numbers of a name, in lower case.

    >>> words("llama3.1:8b") == words("Llama 3.1 8B")
    True
    """
    return tuple(re.findall(r"\d+(?:\.\d+)?|[a-z]+", name.lower()))


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
    bins = [chip for chip in chips() if words(chip.chip) == wanted]
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


def find_gpu(name: str) -> Gpu:
    """The card whose name has the words of ``name`` in a row, such as ``RTX 4090``.

    Raises:
        UnknownName: If there is none, or several and none ends with them.
    """
    wanted = words(name)
    names = {gpu.name: words(gpu.name) for gpu in gpus()}
    inside = [n for n, ws in names.items() if f" {' '.join(wanted)} " in f" {' '.join(ws)} "]
    ending = [n for n in inside if names[n][-len(wanted) :] == wanted]
    found = inside if len(inside) == 1 else ending
    if len(found) != 1 or not wanted:
        choice = ", ".join(inside[:6] if wanted and inside else nearest(name, names))
        raise UnknownName(f"no one graphics card is called {name!r}; did you mean: {choice}")
    return next(gpu for gpu in gpus() if gpu.name == found[0])


def find_model(hf_id: str) -> Model | None:
    """The row of the model with that hub id, whatever the case of its letters."""
    wanted = hf_id.lower()
    return next((model for model in models() if model.hf_id.lower() == wanted), None)


def model_config(model: Model) -> ModelConfig:
    """The shipped ``config.json`` of ``model``."""
    values = json.loads((DATA / "models" / f"{model.config}.json").read_text(encoding="utf-8"))
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
    found: dict[tuple[str, ...], tuple[str, ...]] = {}
    with open(DATA / "aliases.csv", encoding="utf-8", newline="") as file:
        next(file)
        for row in csv.DictReader(file):
            found[words(row["alias"])] = (row["hf_id"],)
    for level in range(4):
        added: dict[tuple[str, ...], tuple[str, ...]] = {}
        for model in models():
            key = words(_forms(model.hf_id)[level])
            added[key] = tuple(dict.fromkeys((*added.get(key, ()), model.hf_id)))
        found = added | found
    return found


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
