"""Coefficients of engines, nearly all the same on every GPU, fitted to public measurements.

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
    "vector",  # operations at the vector rate for each byte of weights: loading, unpacking (decode)
    "matrix",  # of the time that the FLOPs of prompts, and of sequences beside one, take
    "attention",  # of the time that the FLOPs of attention take in training
    "activations",  # of the time that the outputs of all layers take at the bandwidth, in training
    "logits",  # of the time that float32 logits take at the bandwidth, in training
    "dequantize",  # of the time that the weights take in 16 bits at the bandwidth, each pass
    "layers",  # seconds for each layer of a pass
    "expert_layers",  # seconds for each layer with experts, on top
    "unfused_cache",  # the same for the cache, on top, where no one kernel computes attention
    "scores",  # of the time that the scores of attention take at the bandwidth, where stored
    "boundary",  # seconds from one device to the next, whole layers on each
    "shared_layers",  # seconds for each layer and doubling of the devices, every matrix split
    "pipeline",  # part of the time saved by a pipeline of devices that is lost again (prompts)
)
STARTED = ("layers", "expert_layers")
HOST_BOUND = ("transformers",)  # without CUDA graphs, which vLLM and llama.cpp have
# A kernel of fused attention reaches about half the rate of products of matrices: of an A100's peak
# 50 to 73 % (Dao 2023, arXiv:2307.08691), without the masked half that it computes in part.
FUSED = 2


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
        # Vulkan's and Metal's kernels unpack weights within their products (llama.cpp b11434,
        # ``mul_mm.comp``, ``kernel_mul_mm``); CUDA wrote them out in 16 bits for cuBLAS.
        unpacked = work.dequantized_bytes if processor.device == "card" else 0.0
        return units | {
            "memory": work.weights_bytes * work.passes / bandwidth,
            "matrix": (work.flops + (FUSED if fused else 1) * work.attention_flops) / matrix,
            "dequantize": unpacked * work.passes / bandwidth,
            "scores": 0.0 if fused else work.score_bytes / bandwidth,
        }
    vector = processor.vector_flops_per_s or flops_per_byte * bandwidth
    beside = 1 - 1 / work.tokens
    return units | {
        "memory": (work.weights_bytes + work.cache_bytes) / bandwidth,
        "vector": work.weights_bytes / vector if vector else 0.0,
        "matrix": work.flops * beside / matrix if matrix else 0.0,
        "unfused_cache": 0.0 if fused else work.cache_bytes / bandwidth,
        "scores": 0.0 if fused else work.score_bytes / bandwidth,
    }


def seconds(fit: Coefficients, units: Mapping[str, float]) -> float:
    """The time that a fit gives to these units."""
    parts = {name: value * units.get(name, 0.0) for name, value in fit.terms.items()}
    return together(fit.quantity, fit.engine, parts)


def together(quantity: str, engine: str, parts: Mapping[str, float]) -> float:
    """The time of a pass whose parts take so long.

    They add up, but where Python starts every kernel: it runs ahead of the device, which waits for
    it or works as it comes (``HOST_BOUND``).
    """
    started = sum(parts.get(name, 0.0) for name in STARTED)
    if quantity == "decode" and engine in HOST_BOUND:
        return max(started, sum(parts.values()) - started)
    return sum(parts.values())
