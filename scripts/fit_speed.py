"""Fit the coefficients of ``uma.speed`` to public measurements, and say how well they hold.

    python scripts/fit_speed.py [--inference FILE.csv] [--write]

All rows are fitted (``uma/data/speed.csv``, with ``--write``). How well that holds for what was
not fitted is told twice: rows are halved by model and chip, and each half predicted from the
other; and each source is left out in turn, and its rows predicted from all others. A time is
linear in the coefficients, of which none is below zero; the fit has the least sum of absolute
relative errors (iteratively reweighted least squares). Needs numpy.
"""

import argparse
import csv
import hashlib
import io
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from scoring import speed_training  # noqa: E402
from scoring.speed import Case, group_of, predict  # noqa: E402
from scoring.speed_cases import AnyCase, all_cases  # noqa: E402
from scoring.speed_training import TrainingCase  # noqa: E402
from scoring.summary import percentile, statistics  # noqa: E402

from uma.speed import Rate, fitted  # noqa: E402
from uma.speed.fitted import HOST_BOUND, TERMS, Coefficients, Quantity, together  # noqa: E402
from uma.speed.processor import DeviceClass, Processor  # noqa: E402

SPEED, MANUAL = ROOT / "uma/data/speed.csv", ROOT / "docs/speed.md"
NAMED = ("quantity", "engine", "device")
STATED = ("flops_per_byte", "low", "high", "rows", "pairs", "median_abs_error", "source")

Key = tuple[str, str, str]  # quantity, engine, class of device
Name = tuple[str, str]  # class of device, term
Fits = dict[Key, dict[str, float]]

# What is fitted of each engine, the same on every GPU. A prompt without flash attention takes one
# more, ``scores``.
FITTED = {
    ("decode", "llama.cpp"): ("vector", "layers", "expert_layers"),
    ("decode", "mlx"): ("memory", "layers", "expert_layers"),
    ("decode", "transformers"): ("layers", "expert_layers"),
    ("decode", "vllm"): ("memory", "layers"),
    ("prefill", "llama.cpp"): ("matrix", "dequantize", "layers", "scores"),
    ("prefill", "mlx"): ("matrix", "memory", "layers"),
    ("training", "torch"): ("matrix", "attention", "activations", "logits", "dequantize", "layers"),
}
# What AMD's GPUs, under Vulkan and ROCm, have of their own: they reach a smaller part of their rate
# of products, and of their memory where attention is not one kernel.
OWN = {
    ("decode", "llama.cpp", "unified"): ("unfused_cache",),
    ("prefill", "llama.cpp", "unified"): ("matrix",),
}
HOST = ("memory", "layers")
FROM_PROMPTS = ("matrix", "scores")  # what a step of decode takes from them: batches, stored scores
# No memory is read faster than its bandwidth, and no units multiply faster than their rate.
FLOOR = {("decode", "memory"): 1.0, ("prefill", "matrix"): 1.0, ("training", "matrix"): 1.0}
LEAST = 1e-12  # seconds of a layer: a time to divide by where all coefficients are 0


@dataclass(frozen=True, slots=True)
class Equation:
    """A case as sums of coefficients: seconds where devices work at once, and one by one."""

    case: AnyCase
    key: Key
    time_s: float
    at_once: Mapping[Name, float]
    in_turn: Mapping[Name, float]

    def seconds(self, fits: Fits) -> float:
        lost = fits.get(self.key, {}).get("pipeline", 0.0)
        return (1 - lost) * self._sum(self.at_once, fits) + lost * self._sum(self.in_turn, fits)

    def _sum(self, units: Mapping[Name, float], fits: Fits) -> float:
        parts: dict[str, float] = {}
        for (device, term), unit in units.items():
            value = fits.get((self.key[0], self.key[1], device), {}).get(term, 0.0)
            parts[term] = parts.get(term, 0.0) + value * unit
        return together(self.key[0], self.key[1], parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inference", type=Path, default=ROOT / "uma/data/truth/inference.csv")
    parser.add_argument("--training", type=Path, default=ROOT / "uma/data/truth/training.csv")
    parser.add_argument(
        "--write",
        action="store_true",
        help="write uma/data/speed.csv and the table of docs/speed.md",
    )
    options = parser.parse_args()
    cases = all_cases(options.inference, options.training)
    balances = flops_per_byte(cases)
    equations = [equation(case, balances) for case in cases if has_rates(case)]
    fits = fit(equations)
    table = report(equations, fits)
    if options.write:
        SPEED.write_text(as_csv(fits, balances, equations), encoding="utf-8")
        before, _, rest = MANUAL.read_text("utf-8").partition("| group | rows |")
        after = rest.partition("\n\n")[2]
        MANUAL.write_text(f"{before}{table}\n\n{after}", encoding="utf-8")
    print(table)


def half_of(case: AnyCase) -> int:
    """The half that a case is in: by its pair's name, so the same anywhere."""
    return hashlib.sha256(pair_of(case).encode()).digest()[0] % 2


def key_of(case: AnyCase) -> Key:
    return case.quantity, case.engine, case.processors[0].device


def pair_of(case: AnyCase) -> str:
    """The model and chip of a case: rows of one pair are near copies of each other."""
    return f"{case.model} on {case.chip}"


def has_rates(case: AnyCase) -> bool:
    """Whether the figures that a prediction needs are known."""
    return case.quantity != "prefill" or case.processors[0].matrix_flops_per_s is not None


def flops_per_byte(cases: Iterable[AnyCase]) -> dict[str, float]:
    """The middle of the vector rate over the bandwidth, by class of device."""
    known: dict[str, set[Processor]] = defaultdict(set)
    for case in cases:
        known[case.processors[0].device].add(case.processors[0])
    return {device: _balance(processors) for device, processors in known.items()}


def _balance(processors: Iterable[Processor]) -> float:
    found = [
        p.vector_flops_per_s / p.bandwidth_bytes_per_s
        for p in processors
        if p.vector_flops_per_s and p.bandwidth_bytes_per_s
    ]
    return median(found) if found else 0.0


def equation(case: AnyCase, balances: Mapping[str, float]) -> Equation:
    """A case's units, by what ``uma.speed`` itself makes of each coefficient alone."""
    devices = {case.processors[0].device} | ({case.host.processor.device} if case.host else set())
    key = key_of(case)
    alone = speed_training.computing(case) if isinstance(case, TrainingCase) else case

    def units(lost: float) -> dict[Name, float]:
        def time(name: Name | None) -> float:
            fits: Fits = {(*key[:2], device): {"layers": LEAST} for device in devices}
            fits[key]["pipeline"] = lost
            if name is not None:
                fits[(*key[:2], name[0])][name[1]] = 1.0
            with using(fits, balances):
                return time_of(alone)

        none = time(None)
        terms = [(device, term) for device in devices for term in TERMS if term != "pipeline"]
        found = {name: time(name) - none for name in terms}
        return {name: unit for name, unit in found.items() if unit > 10 * LEAST}

    several = len(case.processors) > 1 and case.quantity == "prefill"
    at_once = units(0.0)
    time_s = tokens_of(case) / case.measured_tps
    return Equation(case, key, time_s, at_once, units(1.0) if several else at_once)


def time_of(case: AnyCase) -> float:
    """Seconds that ``uma.speed`` predicts."""
    predicted = speed_training.predict(case) if isinstance(case, TrainingCase) else predict(case)
    assert isinstance(predicted, Rate), predicted
    return tokens_of(case) / predicted.best


def name_of(case: AnyCase) -> str:
    """The group of a case."""
    if isinstance(case, TrainingCase):
        return speed_training.group_of(case)
    return group_of(case)[0]


def tokens_of(case: AnyCase) -> float:
    """Tokens of one step, of the prompts, or of the batches."""
    if isinstance(case, TrainingCase):
        return case.tokens
    return case.batch_size * (1 if case.quantity == "decode" else round(case.tokens))


@contextmanager
def using(fits: Fits, balances: Mapping[str, float]) -> Iterator[None]:
    """``uma.speed`` with these coefficients instead of the shipped ones."""
    shipped = fitted.coefficients
    made = {key: _coefficients(key, terms, balances) for key, terms in fits.items()}
    fitted.coefficients = lambda: made  # type: ignore[assignment]
    try:
        yield
    finally:
        fitted.coefficients = shipped


def _coefficients(key: Key, terms: dict[str, float], balances: Mapping[str, float]) -> Coefficients:
    quantity: Quantity = key[0]  # type: ignore[assignment]
    device: DeviceClass = key[2]  # type: ignore[assignment]
    return Coefficients(quantity, key[1], device, terms, 1, 1, balances.get(key[2], 0.0), 0, 0, "")


def fit(equations: Sequence[Equation]) -> Fits:
    """Coefficients of every engine and class of device: one device first, then what is beside."""
    fits: Fits = {}
    keys = sorted({one.key for one in equations})
    for engine in sorted({key[:2] for key in keys}):
        gpus = [key for key in keys if key[:2] == engine and key[2] != "cpu"]
        alone = [one for one in equations if one.key in gpus and is_alone(one.case)]
        _solve(fits, gpus, alone, FITTED[engine])
    for key in keys:
        own = [one for one in equations if one.key == key]
        prompts = fits.get(("prefill", key[1], key[2]), {})
        if key[0] == "decode":
            taken = {name: prompts[name] for name in FROM_PROMPTS if name in prompts}
            fits.setdefault(key, {}).update(taken)
        several = [one for one in own if len(one.case.processors) > 1]
        if key[0] == "decode":
            _solve(fits, [key], [e for e in several if e.case.split == "layer"], ("boundary",))
            _solve(fits, [key], [e for e in several if e.case.split == "row"], ("shared_layers",))
        elif key[0] == "prefill" and several:
            fits[key]["pipeline"] = _lost(fits, several)
    hosted = [one for one in equations if one.case.host or one.key[2] == "cpu"]
    for engine in {one.case.engine for one in hosted}:
        _solve(fits, [("decode", engine, "cpu")], [e for e in hosted if e.key[0] == "decode"], HOST)
    for key in set(fits) & set(keys):
        own = (one for one in equations if one.key == key)
        met = {term for one in own for device, term in one.at_once if device == key[2]}
        kept = met | {"memory", "pipeline", *FROM_PROMPTS}
        fits[key] = {name: value for name, value in fits[key].items() if name in kept}
    return fits


def is_alone(case: AnyCase) -> bool:
    """Whether one device does all; of training, without experts, for which programs differ."""
    if isinstance(case, TrainingCase) and case.reads.experts:
        return False
    return case.host is None and len(case.processors) == 1 and case.batch_size == 1


def _solve(
    fits: Fits, keys: Sequence[Key], equations: Sequence[Equation], names: Sequence[str]
) -> None:
    """Fit ``names``, the same for all ``keys`` but for their ``OWN``; other coefficients stay."""
    columns = [[(key, name) for key in keys if name not in OWN.get(key, ())] for name in names]
    if len(names) > 1:
        columns += [[(key, name)] for key in keys for name in OWN.get(key, ())]
    for key in keys:
        kept = {one for column in columns for k, one in column if k == key}
        floors = {one: FLOOR.get((key[0], one), 0.0) for one in kept}
        always = {"memory": 1.0} if key[0] == "decode" and "memory" not in kept else {}
        fits[key] = always | fits.get(key, {}) | floors
    times = np.array([one.time_s for one in equations])
    target = 1 - np.array([one.seconds(fits) for one in equations]) / times
    if keys[0][1] in HOST_BOUND and names[0] == "layers":  # beside which weights take no time
        target = np.ones(len(times))
    while columns := [c for c in columns if any(_unit(e, c) for e in equations)]:
        units = np.array([[_unit(one, column) for column in columns] for one in equations])
        found = least_absolute(units / times[:, None], target)
        if (found >= 0).all():
            for column, value in zip(columns, found, strict=True):
                for key, name in column:
                    fits[key][name] += float(value)
            return
        columns.pop(int(np.argmin(found * abs(units).mean(axis=0))))


def _unit(one: Equation, column: Sequence[tuple[Key, str]]) -> float:
    """What a coefficient that several classes share is multiplied with."""
    return sum(one.at_once.get((key[2], name), 0.0) for key, name in column)


def least_absolute(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The coefficients of the least sum of absolute differences."""
    weight = np.ones(len(target))
    for _ in range(100):
        root = weight**0.5
        found, *_ = np.linalg.lstsq(matrix * root[:, None], target * root, rcond=None)
        weight = 1 / np.maximum(abs(matrix @ found - target), 1e-3)
    return found


def _lost(fits: Fits, equations: Sequence[Equation]) -> float:
    """The part of what a pipeline saves that is lost again: the middle of all prompts.

    Of 16-bit weights: quantized ones took llama.cpp's builds of that time longer on large models,
    on one device and on several.
    """
    lost = []
    for one in (e for e in equations if isinstance(e.case, Case) and not e.case.quantized):
        at_once, in_turn = one._sum(one.at_once, fits), one._sum(one.in_turn, fits)
        if in_turn > 1.2 * at_once:
            lost.append((one.time_s - at_once) / (in_turn - at_once))
    return min(1.0, max(0.0, median(lost))) if lost else 0.0


def errors(equations: Iterable[Equation], fits: Fits) -> dict[str, float]:
    """Predicted over measured rate, less one, by row."""
    found = {}
    for one in equations:
        time = one.seconds(fits)
        exchanges = isinstance(one.case, TrainingCase) or one.key[1] in HOST_BOUND
        if exchanges and time > 0:  # which is no sum
            with using(fits, {}):
                time = time_of(one.case)
        if time > 0:
            found[one.case.row_id] = one.time_s / time - 1
    return found


def as_csv(fits: Fits, balances: Mapping[str, float], equations: Sequence[Equation]) -> str:
    """The file of coefficients, each with the quantiles of measured over predicted rates."""
    text = io.StringIO()
    writer = csv.DictWriter(text, NAMED + TERMS + STATED, lineterminator="\n")
    writer.writeheader()
    for key, terms in sorted(fits.items()):
        own = [e for e in equations if e.key == key or (key[2] == "cpu" and e.case.host)]
        own = [e for e in own if e.key[0] == key[0]]
        if not own:
            continue
        ratios = sorted(1 / (1 + error) for error in errors(own, fits).values())
        writer.writerow(
            {name: f"{terms[name]:.4g}" for name in TERMS if terms.get(name)}
            | dict(zip(NAMED, key, strict=True))
            | {
                "flops_per_byte": f"{balances.get(key[2], 0):.3g}",
                "low": f"{percentile(ratios, 0.1):.3f}",
                "high": f"{percentile(ratios, 0.9):.3f}",
                "rows": len(own),
                "pairs": len({pair_of(e.case) for e in own}),
                "median_abs_error": f"{statistics(errors(own, fits))['median_abs_error']:.3f}",
                "source": "; ".join(sorted({e.case.source for e in own})),
            }
        )
    return f"# speed.csv - 1 - {date.today()}\n{text.getvalue()}"


def report(equations: Sequence[Equation], fits: Fits) -> str:
    """Each group: as fitted, each half from the other, each source from all others."""
    halves = held_out(equations, [(half_of(e.case)) for e in equations])
    sources = held_out(equations, [e.case.source for e in equations])
    groups: dict[str, list[Equation]] = defaultdict(list)
    for one in equations:
        groups[name_of(one.case)].append(one)
    lines = [
        "| group | rows | pairs | fitted: median, p90, bias | other half fitted "
        "| other sources fitted | sources |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, own in sorted(groups.items()):
        cells = [name, len(own), len({pair_of(one.case) for one in own}), _shown(errors(own, fits))]
        for found in (halves, sources):
            rows = (found.get((one.case.quantity, one.case.row_id)) for one in own)
            cells.append(_shown({str(i): row for i, row in enumerate(rows) if row is not None}))
        cells.append(len({one.case.source for one in own}))
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def held_out(
    equations: Sequence[Equation], parts: Sequence[object]
) -> dict[tuple[str, str], float]:
    """The error of each row, predicted from the rows of all other parts."""
    found: dict[tuple[str, str], float] = {}
    for part in dict.fromkeys(parts):
        rest = fit([e for e, own in zip(equations, parts, strict=True) if own != part])
        for one, own in zip(equations, parts, strict=True):
            if own == part:
                for row, error in errors([one], rest).items():
                    found[one.case.quantity, row] = error
    return found


def _shown(found: dict[str, float]) -> str:
    values = statistics(found).values()
    return ", ".join("-" if value is None else f"{value:.1%}" for value in values)


if __name__ == "__main__":
    main()
