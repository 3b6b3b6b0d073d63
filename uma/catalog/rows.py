"""Rows of the catalog's files: a row's fields are its file's columns."""

from typing import Any, Literal, NamedTuple

from uma.frozen import dataclass

Basis = Literal["exact", "transcribed", "derived"]
"""Of a ``config.json``: a copy, some of its keys typed in, or made from published shapes."""


class Chip(NamedTuple):
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


class Mac(NamedTuple):
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


class Gpu(NamedTuple):
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


class UnifiedMachine(NamedTuple):
    """A machine, not a Mac, whose GPU and CPU share one memory, or two tiers of it (GH200).

    ``gpu_usable_gib`` is what the GPU has as delivered, ``gpu_usable_high_gib`` what it can be
    given. With two tiers ``host_memory_gib`` is the slow one, and ``bandwidth_gb_per_s`` that of
    the fast one; ``link_gb_per_s`` joins them, in one direction. ``achieved_gb_per_s`` is what a
    kernel of its GPU was measured to read. Rates are dense; ``fp32_tflops`` is that of the vector
    units, ``bf16_tflops`` accumulates in 32 bits.
    """

    name: str
    vendor: str
    year: int
    chip: str
    memory_gib: int | None
    memory_type: str
    bandwidth_gb_per_s: float | None
    achieved_gb_per_s: float | None
    gpu_usable_gib: float | None
    gpu_usable_high_gib: float | None
    host_memory_gib: int | None
    link_gb_per_s: float | None
    gpu_limit_note: str
    fp16_tflops: float | None
    fp32_tflops: float | None
    bf16_tflops: float | None
    power_w: int | None
    price_usd: int | None
    price_kind: str
    os: str
    source: str
    confidence: str
    note: str


class Model(NamedTuple):
    """An open-weight model; ``config`` names its file in ``data/models``.

    ``parameters`` counts the text decoder from its shapes, ``parameters_hf`` what the hub states.
    ``own_keys`` are sizes that the model's page gives and ``config``, which may be a sibling's of
    the same shape, has otherwise or not at all: ``max_position_embeddings=262144``.
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
    own_keys: str
    source: str
    confidence: str
    note: str


class Repository(NamedTuple):
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
