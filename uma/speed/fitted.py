"""Coefficients by engine and class of device, fitted to public measurements.

``scripts/fit_speed.py`` writes ``uma/data/speed.csv``; ``docs/speed.md`` says how well they hold.
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal, cast

from uma.catalog import DATA
from uma.speed.processor import DeviceClass, Processor
from uma.speed.work import Work

Quantity = Literal["decode", "prefill", "training"]

TERMS = (
    "memory",  # of the time that weights, and a cache that one kernel reads, take at the bandwidth
    "experts",  # the same for routed experts, on top
    "vector",  # operations at the vector rate for each byte of weights: loading, unpacking (decode)
    "matrix",  # of the time that the FLOPs of prompts, and of sequences beside one, take
    "attention",  # of the time that the FLOPs of attention take in training
    "activations",  # of the time that the outputs of all layers take at the bandwidth, in training
    "logits",  # of the time that float32 logits take at the bandwidth, in training
    "dequantize",  # of the time that the weights take in 16 bits at the bandwidth, each pass
    "layers",  # seconds for each layer of a pass
    "expert_layers",  # seconds for each layer with experts, on top
    "unfused",  # seconds for each FLOP of attention in decode, where scores are stored
    "unfused_cache",  # of the time that the cache takes at the bandwidth, where they are
    "scores",  # of the time that the scores of a prompt take at the bandwidth, where stored
    "boundary",  # seconds from one device to the next, whole layers on each
    "shared_layers",  # seconds for each layer and doubling of the devices, every matrix split
    "pipeline",  # part of the time saved by a pipeline of devices that is lost again (prompts)
)


@dataclass(frozen=True, slots=True)
class Coefficients:
    """One fit: what a second is made of, and how far measurements were from it.

    ``low`` and ``high`` are the 10th and 90th percentile of measured over predicted rates.
    ``flops_per_byte`` is the vector rate over the bandwidth, in the middle of the devices fitted.
    """

    quantity: Quantity
    engine: str
    device: DeviceClass
    terms: Mapping[str, float]
    low: float
    high: float
    flops_per_byte: float
    rows: int
    median_abs_error: float
    source: str


@cache
def coefficients() -> dict[tuple[str, str, str], Coefficients]:
    """Every fit by quantity, engine and class of device."""
    with open(DATA / "speed.csv", encoding="utf-8", newline="") as file:
        next(file)
        return {
            (line["quantity"], line["engine"], line["device"]): _coefficients(line)
            for line in csv.DictReader(file)
        }


def _coefficients(line: dict[str, str]) -> Coefficients:
    return Coefficients(
        quantity=cast(Quantity, line["quantity"]),
        engine=line["engine"],
        device=cast(DeviceClass, line["device"]),
        terms={name: float(line[name]) for name in TERMS if line[name]},
        low=float(line["low"]),
        high=float(line["high"]),
        flops_per_byte=float(line["flops_per_byte"]),
        rows=int(line["rows"]),
        median_abs_error=float(line["median_abs_error"]),
        source=line["source"],
    )


def term_units(
    quantity: Quantity,
    work: Work,
    processor: Processor,
    *,
    fused: bool,
    flops_per_byte: float = 0,
) -> dict[str, float]:
    """What each coefficient is multiplied with: seconds, layers or FLOPs.

    ``fused`` says that one kernel computes attention (flash attention). A vector rate that is not
    known is taken as ``flops_per_byte`` times the bandwidth.
    """
    bandwidth = processor.bandwidth_bytes_per_s
    assert bandwidth is not None
    matrix = processor.matrix_flops_per_s
    units = {
        "layers": work.layers * work.passes,
        "expert_layers": work.expert_layers * work.passes,
    }
    if quantity == "prefill":
        assert matrix is not None
        return units | {
            "memory": work.weights_bytes * work.passes / bandwidth,
            "matrix": (work.flops + work.attention_flops) / matrix,
            "dequantize": work.dequantized_bytes * work.passes / bandwidth,
            "scores": 0.0 if fused else work.score_bytes / bandwidth,
        }
    vector = processor.vector_flops_per_s or flops_per_byte * bandwidth
    beside = 1 - 1 / work.tokens
    return units | {
        "memory": (work.weights_bytes + (work.cache_bytes if fused else 0)) / bandwidth,
        "experts": work.expert_bytes / bandwidth,
        "vector": work.weights_bytes / vector if vector else 0.0,
        "matrix": work.flops * beside / matrix if matrix else 0.0,
        "unfused": 0.0 if fused else work.attention_flops,
        "unfused_cache": 0.0 if fused else work.cache_bytes / bandwidth,
    }


def seconds(fit: Coefficients, units: Mapping[str, float]) -> float:
    """The time that a fit gives to these units."""
    return sum(value * units.get(name, 0.0) for name, value in fit.terms.items())
