"""What two articles say of fine-tuning, and what is computed: the rows of one table.

The figures that the articles give are constants here.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

from uma.memory.optimizer_states import torch_states
from uma.plan.training.changes import spread_words
from uma.plan.training.estimate import training_estimate
from uma.plan.training.places import places
from uma.plan.training.stack import Stack
from uma.units import GB
from uma.workload import Sharding

from .cases import (
    MIXED,
    OF_2024,
    ONE_ROW,
    PLAIN,
    PREPARED,
    architecture_of,
    checkpointed,
    gb,
    term,
    torch,
)

SEVEN, EIGHT, SEVENTY = "llama-2-7b-hf", "llama-3-8b", "llama-3-70b"
Row = tuple[str, ...]


def rules_table() -> Iterator[Row]:
    yield "said", "computed", "off by", "asked"
    yield from chain(
        _seven_in_full(),
        _bases_of_8b(),
        _adapters_of_8b(),
        _seventy_in_4_bits(),
        _seventy_in_full(),
        _shares(),
        _checkpointing(),
        _widths(),
        _buffers(),
    )


def needed(model: str, **asked: Any) -> int:
    """Bytes that the whole device shows, with the paged states that it has room for."""
    case = torch(model, **{"mem_kind": "device"} | ONE_ROW | asked)
    return training_estimate(case).ledger.predicted_peak_bytes


def words(model: str, stack: Stack = PLAIN, **asked: Any) -> str:
    """The options that ask for it, beside those that the page names for all rows.

    >>> words("llama-3-8b", MIXED, method="full", max_seq_length=512)
    '`llama-3-8b --train full --precision mixed --max-seq-length 512`'
    """
    said = [model, "--train", asked.get("method", "lora")]
    if stack.name != "trainer":
        said += ["--stack", stack.name]
    if stack.precision != "16-bit":
        said += ["--precision", stack.precision]
    names = {"quantized": "quant", "max_seq_length": "max-seq-length", "mem_kind": "mem-kind"}
    for name, option in (names | {"optimizer": "optimizer"}).items():
        if name in asked:
            said += [f"--{option}", str(asked[name])]
    spread = asked.get("sharding", Sharding())
    if spread.data > 1:
        said += spread_words(spread)
    for name in ("optimizer", "parameters"):
        if place := getattr(spread, f"offload_{name}"):
            said += [f"--offload-{name}", place]
    return f"`{' '.join(said)}`"


def _off(found: float, told: float) -> str:
    """
    >>> _off(15, 12)
    '+25%'
    """
    return f"{found / told - 1:+.0%}"


def _each(model: str, lengths: tuple[int, ...], **asked: Any) -> str:
    return ", ".join(
        f"{gb(needed(model, max_seq_length=tokens, **asked))} at {tokens:,} tokens"
        for tokens in lengths
    )


def _seven_in_full() -> Iterator[Row]:
    full: dict[str, Any] = {"method": "full", "max_seq_length": 2048}
    allocated = full | {"mem_kind": "allocated"}
    parameters = architecture_of(SEVEN).num_parameters
    pure, mixed, old = (needed(SEVEN, stack=s, **allocated) for s in (PLAIN, MIXED, OF_2024))
    yield (
        "16 to 20 bytes a parameter with Adam in mixed precision",
        f"{mixed / parameters:.1f} with float32 weights under autocast, {old / parameters:.1f} "
        f"with `--stack trainer-2024`, {pure / parameters:.1f} all in 16 bits",
        f"{_off(mixed / parameters, 16)} from 16",
        words(SEVEN, MIXED, **allocated),
    )
    yield (
        "7B: 112 GB",
        f"{gb(mixed)} for {parameters / 1e9:.2f} billion",
        _off(mixed, 112 * GB),
        "the same",
    )
    pure, mixed = (needed(SEVEN, stack=s, **full) for s in (PLAIN, MIXED))
    yield (
        "7B with activations: over 140 GB",
        f"{gb(mixed)} on the card, {gb(pure)} all in 16 bits",
        f"{_off(mixed, 140 * GB)}, {_off(pure, 140 * GB)}",
        words(SEVEN, MIXED, **full),
    )


def _bases_of_8b() -> Iterator[Row]:
    base, prepared = (
        term(torch(EIGHT, stack=s, quantized="nf4"), "weights") for s in (PLAIN, PREPARED)
    )
    yield (
        "4-bit base of 8B: 4 GB",
        f"{gb(base)}, {gb(prepared)} with `--prepare-kbit`",
        f"{_off(base, 4 * GB)}, {_off(prepared, 4 * GB)}",
        words(EIGHT, quantized="nf4"),
    )
    whole = 2 * architecture_of(EIGHT).num_parameters
    yield "16-bit base of 8B: 16 GB", gb(whole), "0%", words(EIGHT)


def _adapters_of_8b() -> Iterator[Row]:
    first, last = (needed(EIGHT, quantized="nf4", max_seq_length=n) for n in (512, 4096))
    yield (
        "8B QLoRA: 12 to 16 GB",
        _each(EIGHT, (512, 1024, 2048, 4096), quantized="nf4"),
        f"{_off(first, 12 * GB)} to {_off(last, 16 * GB)}",
        words(EIGHT, quantized="nf4", max_seq_length="N"),
    )
    first, last = (needed(EIGHT, max_seq_length=n) for n in (512, 4096))
    yield (
        "8B LoRA: about 24 GB",
        _each(EIGHT, (512, 2048, 4096)),
        f"{_off(first, 24 * GB)} to {_off(last, 24 * GB)}",
        words(EIGHT, max_seq_length="N"),
    )


def _seventy_in_4_bits() -> Iterator[Row]:
    """QLoRA of 70B on cards of 24 GB."""
    asked: dict[str, Any] = {"quantized": "nf4-double", "max_seq_length": 512}
    paged = asked | {"optimizer": "paged-adamw-8bit"}
    big = needed(SEVENTY, **paged)
    yield (
        "70B QLoRA on one card of 24 GB",
        gb(big),
        f"{big / (24 * GB):.1f} times",
        words(SEVENTY, **paged),
    )
    pair = Sharding(data=2, zero_stage=3, fsdp=True)
    host = replace(pair, offload_optimizer="host", offload_parameters="host")
    both, moved = (
        needed(SEVENTY, machine="2xrtx-4090", sharding=spread, **asked) for spread in (pair, host)
    )
    yield (
        "the same on two, with FSDP",
        f"{gb(both)} a card, {gb(moved)} with parameters on the host",
        f"{_off(both, 24 * GB)}, {_off(moved, 24 * GB)}",
        words(SEVENTY, sharding=host, **asked),
    )


def _seventy_in_full() -> Iterator[Row]:
    """All of it on 8 cards of 80 GB, as the article has it."""
    full: dict[str, Any] = {"method": "full", "max_seq_length": 2048}
    machine, zero = "8xa100-80gb", Sharding(data=8, zero_stage=3)
    plain, fsdp = (
        needed(SEVENTY, machine=machine, sharding=spread, **full)
        for spread in (zero, replace(zero, fsdp=True))
    )
    host = replace(zero, offload_optimizer="host")
    case = torch(SEVENTY, machine, sharding=host, mem_kind="device", **full, **ONE_ROW)
    yield (
        "70B in full on 8 cards of 80 GB with ZeRO 3 or FSDP",
        f"{gb(plain)} a card with ZeRO 3, {gb(fsdp)} with FSDP in 16 bits; "
        f"{gb(case.needed_bytes())} and {gb(8 * places(case).host_bytes)} of the host with the "
        "optimizer there",
        f"{_off(plain, 80 * GB)}, {_off(fsdp, 80 * GB)}",
        words(SEVENTY, sharding=host, **full),
    )


def _shares() -> Iterator[Row]:
    few, many = (
        torch(EIGHT, **asked).trainable_parameters / architecture_of(EIGHT).num_parameters
        for asked in ({"targets": ("q_proj", "v_proj")}, {"rank": 64})
    )
    yield (
        "LoRA trains less than 1 %, sometimes less than 0.1 %",
        f"{few:.2%} (rank 8, q and v) to {many:.1%} (rank 64, all)",
        "true of small ranks",
        words(EIGHT),
    )


def _checkpointing() -> Iterator[Row]:
    saved = [
        round(100 * (1 - every / none))
        for model in (SEVEN, EIGHT)
        for none, every in (checkpointed(model, tokens, (0, 1)) for tokens in (1024, 4096))
    ]
    least, most = min(saved), max(saved)
    yield (
        "checkpointing saves 60 to 75 % of the activations",
        f"{least} to {most} %, every layer, one row",
        f"{least - 75:+d} to {most - 75:+d} points from 75",
        "the table above",
    )
    yield (
        "checkpointing takes 20 to 30 % more time",
        "one forward pass more: 33 % of the products of full training, 50 % of LoRA's",
        "+3 to +30 points",
        "",
    )


def _widths() -> Iterator[Row]:
    """Bytes that are kept for each trained parameter."""
    small = torch_states("adamw-8bit", (4096, 4096), 4).device_bytes / 4096**2
    yield (
        "8-bit AdamW: 2 bytes a parameter",
        f"{small:.2f}, scales included",
        _off(small, 2),
        words(EIGHT, optimizer="adamw-8bit"),
    )
    yield (
        "gradients: 2 bytes",
        "4 for adapters, in PEFT and in mlx-lm; 2 under DeepSpeed",
        "twice",
        words(EIGHT),
    )


def _buffers() -> Iterator[Row]:
    held = term(torch(EIGHT, mem_kind="device"), "runtime_context")
    slack = term(torch(EIGHT, mem_kind="device", max_seq_length=2048, **ONE_ROW), "buffer_pool")
    yield (
        "CUDA's buffers: 1.2 to 2.5 GB",
        f"{gb(held)} of context and {gb(slack)} of the allocator (8B LoRA, 2,048 tokens)",
        f"{_off(held + slack, 2.5 * GB)} from 2.5",
        words(EIGHT),
    )
