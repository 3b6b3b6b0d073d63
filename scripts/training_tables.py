"""Write the tables of docs/training-memory.md from the library; ``--check`` compares.

A table follows a comment with its name, such as ``<!-- table: weights -->``. The figures of two
articles that the page quotes are constants here.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from uma.architecture import architecture_from_config  # noqa: E402
from uma.architecture.layers import Architecture  # noqa: E402
from uma.catalog import model_config  # noqa: E402
from uma.checkpoint.free_names import find_free  # noqa: E402
from uma.ledger import phase_totals  # noqa: E402
from uma.machine import budget_of  # noqa: E402
from uma.machine.named import machine_named  # noqa: E402
from uma.memory.optimizer_states import mlx_states, torch_states  # noqa: E402
from uma.memory.weights import weight_bytes  # noqa: E402
from uma.plan.training.case import TrainingCase  # noqa: E402
from uma.plan.training.changes import near_root  # noqa: E402
from uma.plan.training.checks import MLX_OPTIMIZERS  # noqa: E402
from uma.plan.training.estimate import training_estimate  # noqa: E402
from uma.plan.training.places import places  # noqa: E402
from uma.plan.training.stack import Stack  # noqa: E402
from uma.quantization import Quantization  # noqa: E402
from uma.units import GB  # noqa: E402
from uma.workload import OPTIMIZERS, Sharding, TrainingWorkload, bits_word  # noqa: E402

PAGE = ROOT / "docs" / "training-memory.md"
TABLE = re.compile(r"<!-- table: (\w+) -->\n(?:\|[^\n]*\n)+")
ONE_ROW: dict[str, Any] = {"batch_size": 1, "grad_checkpoint": 1}
PLAIN, MIXED, OF_2024 = Stack(), Stack(precision="mixed"), Stack("trainer-2024", precision="mixed")
PREPARED = Stack(prepare_kbit=True)


@cache
def architecture_of(name: str) -> Architecture:
    return architecture_from_config(model_config(find_free(name)).values)


def torch(
    model: str, machine: str = "a100-80gb", stack: Stack = PLAIN, **asked: Any
) -> TrainingCase:
    """A case under PyTorch: AdamW, all layers, what torch allocates, unless asked otherwise."""
    here = machine_named(machine)
    workload = TrainingWorkload(**{"optimizer": "adamw", "num_layers": None} | asked)
    architecture = architecture_of(model)
    return TrainingCase(architecture, here, budget_of(here), "torch", workload, stack=stack)


def mlx(model: str, bits: int, **asked: Any) -> TrainingCase:
    """A case under mlx_lm.lora, with its defaults."""
    here, architecture = machine_named("mac-studio-m2-ultra-192"), architecture_of(model)
    weights = weight_bytes(architecture, None if bits == 16 else Quantization(bits, 64))
    workload = TrainingWorkload(quantized=bits_word(bits), **asked)
    return TrainingCase(architecture, here, budget_of(here), "mlx", workload, weights)


def gb(size_bytes: float) -> str:
    """GB of 10^9 bytes, as the articles count, and MB below one.

    >>> gb(16.06e9), gb(84e6), gb(0)
    ('16.1 GB', '84 MB', '0')
    """
    if size_bytes < GB:
        return f"{size_bytes / 1e6:,.0f} MB" if size_bytes else "0"
    return f"{size_bytes / GB:,.1f} GB"


def term(case: TrainingCase, name: str) -> int:
    """Bytes of what is always there under that name."""
    return sum(t.size_bytes for t in case.terms() if t.name == name and t.phase == "always")


def weights_table() -> Iterator[tuple[str, ...]]:
    yield "base of Llama-3-8B", "bytes a parameter", "size"
    parameters = architecture_of("llama-3-8b").num_parameters
    sizes = {
        "bfloat16": term(torch("llama-3-8b"), "weights"),
        "nf4, blocks of 64": term(torch("llama-3-8b", quantized="nf4"), "weights"),
        "nf4, doubly quantized": term(torch("llama-3-8b", quantized="nf4-double"), "weights"),
        "nf4 after `prepare_model_for_kbit_training` (`--prepare-kbit`)": term(
            torch("llama-3-8b", stack=PREPARED, quantized="nf4"), "weights"
        ),
        "int8 after it": term(torch("llama-3-8b", stack=PREPARED, quantized="int8"), "weights"),
        "GPTQ, 4 bits": term(torch("llama-3-8b", quantized="gptq"), "weights"),
        "MLX, 4 bits in groups of 64": term(mlx("llama-3-8b", 4), "weights"),
    }
    for name, size in sizes.items():
        yield name, f"{size / parameters:.2f}", gb(size)


def trained_table() -> Iterator[tuple[str, ...]]:
    yield "Llama-3-8B", "trained", "share", "adapters or masters", "gradients", "AdamW's states"
    zero = Sharding(data=2, zero_stage=1)
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("LoRA, rank 8, q and v", {"targets": ("q_proj", "v_proj")}),
        ("LoRA, rank 8, all matrices", {}),
        ("LoRA, rank 64, all matrices", {"rank": 64}),
        ("DoRA, rank 8, all matrices", {"method": "dora"}),
        ("full, all in 16 bits", {"method": "full"}),
        ("full, DeepSpeed in bf16", {"method": "full", "sharding": zero}),
    ]
    parameters = architecture_of("llama-3-8b").num_parameters
    for name, asked in kinds:
        case = torch("llama-3-8b", **asked)
        trained, shards = case.trainable_parameters, case.workload.sharding.shards
        gradients = 4 if case.workload.method != "full" else 2
        kept = term(case, "adapters") + shards * term(case, "master_weights")
        states = shards * term(case, "optimizer_states")
        yield (
            name,
            f"{trained / 1e6:,.1f} M",
            f"{trained / parameters:.2%}",
            gb(kept),
            gb(gradients * trained),
            gb(states),
        )


def optimizers_table() -> Iterator[tuple[str, ...]]:
    yield "optimizer", "torch, bytes a float32 parameter", "MLX"
    shape, known = (4096, 14336), {n for names in MLX_OPTIMIZERS.values() for n in names}
    for name in OPTIMIZERS:
        found = torch_states(name, shape, 4)
        elements = shape[0] * shape[1]
        there = f"{found.device_bytes / elements:.2f}"
        if found.paged_bytes:
            there += f" and {found.paged_bytes / elements:.2f} on the host"
        own = f"{mlx_states(name, shape, 4).device_bytes / elements:.2f}" if name in known else ""
        yield name, there, own


def logits_table() -> Iterator[tuple[str, ...]]:
    yield "loss", "logits of 4,096 tokens, 128,256 words", "bytes a logit"
    for loss in ("naive", "fused", "sliced"):
        case = torch("llama-3-8b", max_seq_length=4096, loss=loss, **ONE_ROW)
        size = sum(t.size_bytes for t in case.terms() if t.name == "logits")
        yield loss, gb(size), f"{size / 4096 / 128_256:.1f}"


def checkpointing_table() -> Iterator[tuple[str, ...]]:
    yield (
        "model, tokens",
        "none",
        "of a layer, in inputs",
        "every layer",
        "every 4th, about the root",
        "every layer saves",
    )
    for model, name in (("llama-2-7b-hf", "Llama-2-7B"), ("llama-3-8b", "Llama-3-8B")):
        architecture = architecture_of(model)
        layers = len(architecture.layers)
        assert near_root(layers) == 4
        for tokens in (1024, 4096):
            none, every, fourth = (
                _activations(torch(model, batch_size=1, max_seq_length=tokens, grad_checkpoint=k))
                for k in (0, 1, 4)
            )
            inside = none / layers / (2 * tokens * architecture.hidden_size)
            saved = f"{1 - every / none:.0%}"
            yield f"{name}, {tokens:,}", gb(none), f"{inside:.0f}", gb(every), gb(fourth), saved


def _activations(case: TrainingCase) -> int:
    terms = case.terms()
    totals = phase_totals(terms)
    held = sum(t.size_bytes for t in terms if t.phase == "always")
    return max(totals["forward"], totals["backward"]) - held


def mlx_table() -> Iterator[tuple[str, ...]]:
    yield (
        "Llama-3-8B in 4 bits, batch 4, 16 layers",
        "mlx_lm.lora",
        "checkpointed",
        "if attention were fused",
        "uma lora train",
    )
    for tokens in (512, 1024, 2048, 4096):
        cases = [
            mlx("llama-3-8b", 4, max_seq_length=tokens, **asked)
            for asked in ({}, {"grad_checkpoint": 1}, {"attention": "fused"})
        ]
        cases.append(replace(cases[0], trainer="uma"))
        yield f"{tokens:,} tokens", *(gb(case.needed_bytes()) for case in cases)


SHARDINGS: dict[str, tuple[Sharding, Stack]] = {
    "data parallel, float32 weights": (Sharding(data=8), MIXED),
    "ZeRO 1": (Sharding(data=8, zero_stage=1), PLAIN),
    "ZeRO 2": (Sharding(data=8, zero_stage=2), PLAIN),
    "ZeRO 3": (Sharding(data=8, zero_stage=3), PLAIN),
    "ZeRO 2, optimizer on the host": (
        Sharding(data=8, zero_stage=2, offload_optimizer="host"),
        PLAIN,
    ),
    "ZeRO 3, all on the host": (
        Sharding(data=8, zero_stage=3, offload_optimizer="host", offload_parameters="host"),
        PLAIN,
    ),
    "ZeRO 3, all on a disk": (
        Sharding(data=8, zero_stage=3, offload_optimizer="disk", offload_parameters="disk"),
        PLAIN,
    ),
    "FSDP in 16 bits": (Sharding(data=8, zero_stage=3, fsdp=True), PLAIN),
    "FSDP in groups of 4": (Sharding(data=8, zero_stage=3, shard_group=4, fsdp=True), PLAIN),
}


def sharding_table() -> Iterator[tuple[str, ...]]:
    yield "full, Llama-3-8B on 8 devices", "on a device", "on the host", "on the disk", "sent"
    for name, (spread, stack) in SHARDINGS.items():
        found = places(torch("llama-3-8b", stack=stack, method="full", sharding=spread, **ONE_ROW))
        sent = ", ".join(f"{cause} {gb(size)}" for cause, size in found.sent_bytes.items())
        host, disk = 8 * found.host_bytes, 8 * found.disk_bytes
        yield name, gb(found.device_bytes), gb(host), gb(disk), sent


def parallel_table() -> Iterator[tuple[str, ...]]:
    yield "full, Llama-3-70B, 16 devices", "state on a device", "sent for an update of 8 batches"
    spreads = {
        "data 16, FSDP": Sharding(data=16, zero_stage=3, fsdp=True),
        "tensor 8, data 2": Sharding(data=2, tensor=8, zero_stage=3, fsdp=True),
        "pipeline 4, data 4": Sharding(data=4, pipeline=4, zero_stage=3, fsdp=True),
        "sequence 8, data 2": Sharding(data=2, sequence=8, zero_stage=3, fsdp=True),
    }
    for name, spread in spreads.items():
        found = places(
            torch(
                "llama-3-70b",
                method="full",
                sharding=spread,
                max_seq_length=8192,
                grad_accumulation_steps=8,
                **ONE_ROW,
            )
        )
        sent = ", ".join(f"{cause} {gb(size)}" for cause, size in found.sent_bytes.items())
        yield name, gb(found.device_bytes), sent


def needed(model: str, **asked: Any) -> int:
    """What the whole device shows, with the paged states that it has room for."""
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
        said += ["--devices", str(spread.data)]
        said += ["--fsdp", "full"] if spread.fsdp else ["--zero-stage", str(spread.zero_stage)]
    for name in ("optimizer", "parameters"):
        if place := getattr(spread, f"offload_{name}"):
            said += [f"--offload-{name}", place]
    return f"`{' '.join(said)}`"


def each(model: str, lengths: tuple[int, ...], **asked: Any) -> str:
    return ", ".join(
        f"{gb(needed(model, max_seq_length=tokens, **asked))} at {tokens:,} tokens"
        for tokens in lengths
    )


def rules_table() -> Iterator[tuple[str, ...]]:
    """What two articles say, and what is computed."""
    yield "said", "computed", "off by", "asked"
    eight = architecture_of("llama-3-8b")
    full: dict[str, Any] = {"method": "full", "max_seq_length": 2048, "mem_kind": "allocated"}
    seven = architecture_of("llama-2-7b-hf").num_parameters
    pure, mixed, old = (needed("llama-2-7b-hf", stack=s, **full) for s in (PLAIN, MIXED, OF_2024))
    yield (
        "16 to 20 bytes a parameter with Adam in mixed precision",
        f"{mixed / seven:.1f} with float32 weights under autocast, {old / seven:.1f} with "
        f"`--stack trainer-2024`, {pure / seven:.1f} all in 16 bits",
        f"{mixed / seven / 16 - 1:+.0%} from 16",
        words("llama-2-7b-hf", MIXED, **full),
    )
    yield (
        "7B: 112 GB",
        f"{gb(mixed)} for {seven / 1e9:.2f} billion",
        f"{mixed / (112 * GB) - 1:+.0%}",
        "the same",
    )
    full["mem_kind"] = "device"
    pure, mixed = (needed("llama-2-7b-hf", stack=s, **full) for s in (PLAIN, MIXED))
    yield (
        "7B with activations: over 140 GB",
        f"{gb(mixed)} on the card, {gb(pure)} all in 16 bits",
        f"{mixed / (140 * GB) - 1:+.0%}, {pure / (140 * GB) - 1:+.0%}",
        words("llama-2-7b-hf", MIXED, method="full", max_seq_length=2048),
    )
    base, prepared = (
        term(torch("llama-3-8b", stack=s, quantized="nf4"), "weights") for s in (PLAIN, PREPARED)
    )
    yield (
        "4-bit base of 8B: 4 GB",
        f"{gb(base)}, {gb(prepared)} with `--prepare-kbit`",
        f"{base / (4 * GB) - 1:+.0%}, {prepared / (4 * GB) - 1:+.0%}",
        words("llama-3-8b", quantized="nf4"),
    )
    yield "16-bit base of 8B: 16 GB", gb(2 * eight.num_parameters), "0%", words("llama-3-8b")
    lengths = (512, 1024, 2048, 4096)
    sizes = [needed("llama-3-8b", quantized="nf4", max_seq_length=n) / GB for n in lengths]
    yield (
        "8B QLoRA: 12 to 16 GB",
        each("llama-3-8b", lengths, quantized="nf4"),
        f"{sizes[0] / 12 - 1:+.0%} to {sizes[-1] / 16 - 1:+.0%}",
        words("llama-3-8b", quantized="nf4", max_seq_length="N"),
    )
    lora = [needed("llama-3-8b", max_seq_length=tokens) / (24 * GB) - 1 for tokens in (512, 4096)]
    yield (
        "8B LoRA: about 24 GB",
        each("llama-3-8b", (512, 2048, 4096)),
        f"{lora[0]:+.0%} to {lora[1]:+.0%}",
        words("llama-3-8b", max_seq_length="N"),
    )
    yield from _seventy()
    shares = [
        torch("llama-3-8b", **asked).trainable_parameters / eight.num_parameters
        for asked in ({"targets": ("q_proj", "v_proj")}, {"rank": 64})
    ]
    yield (
        "LoRA trains less than 1 %, sometimes less than 0.1 %",
        f"{shares[0]:.2%} (rank 8, q and v) to {shares[1]:.1%} (rank 64, all)",
        "true of small ranks",
        words("llama-3-8b"),
    )
    rows = list(checkpointing_table())[1:]
    saved = sorted(int(row[-1].rstrip("%")) for row in rows)
    yield (
        "checkpointing saves 60 to 75 % of the activations",
        f"{saved[0]} to {saved[-1]} %, every layer, one row",
        f"{saved[0] - 75:+d} to {saved[-1] - 75:+d} points from 75",
        "the table above",
    )
    yield (
        "checkpointing takes 20 to 30 % more time",
        "one forward pass more: 33 % of the products of full training, 50 % of LoRA's",
        "+3 to +30 points",
        "",
    )
    small = torch_states("adamw-8bit", (4096, 4096), 4).device_bytes / 4096**2
    yield (
        "8-bit AdamW: 2 bytes a parameter",
        f"{small:.2f}, scales included",
        f"{small / 2 - 1:+.0%}",
        words("llama-3-8b", optimizer="adamw-8bit"),
    )
    yield (
        "gradients: 2 bytes",
        "4 for adapters, in PEFT and in mlx-lm; 2 under DeepSpeed",
        "twice",
        words("llama-3-8b"),
    )
    held = term(torch("llama-3-8b", mem_kind="device"), "runtime_context")
    slack = term(
        torch("llama-3-8b", mem_kind="device", max_seq_length=2048, **ONE_ROW), "buffer_pool"
    )
    yield (
        "CUDA's buffers: 1.2 to 2.5 GB",
        f"{gb(held)} of context and {gb(slack)} of the allocator (8B LoRA, 2,048 tokens)",
        f"{(held + slack) / (2.5 * GB) - 1:+.0%} from 2.5",
        words("llama-3-8b"),
    )


def _seventy() -> Iterator[tuple[str, ...]]:
    """QLoRA of 70B on cards of 24 GB, and all of it on 8 cards of 80 GB, as the article has it."""
    asked: dict[str, Any] = {"quantized": "nf4-double", "max_seq_length": 512}
    paged = asked | {"optimizer": "paged-adamw-8bit"}
    big = needed("llama-3-70b", **paged)
    yield (
        "70B QLoRA on one card of 24 GB",
        f"{gb(big)}",
        f"{big / (24 * GB):.1f} times",
        words("llama-3-70b", **paged),
    )
    pair = Sharding(data=2, zero_stage=3, fsdp=True)
    host = replace(pair, offload_optimizer="host", offload_parameters="host")
    both, moved = (
        needed("llama-3-70b", machine="2xrtx-4090", sharding=spread, **asked)
        for spread in (pair, host)
    )
    yield (
        "the same on two, with FSDP",
        f"{gb(both)} a card, {gb(moved)} with parameters on the host",
        f"{both / (24 * GB) - 1:+.0%}, {moved / (24 * GB) - 1:+.0%}",
        words("llama-3-70b", sharding=host, **asked),
    )
    full: dict[str, Any] = {"method": "full", "max_seq_length": 2048}
    zero, fsdp = Sharding(data=8, zero_stage=3), Sharding(data=8, zero_stage=3, fsdp=True)
    sizes = [
        needed("llama-3-70b", machine="8xa100-80gb", sharding=spread, **full)
        for spread in (zero, fsdp)
    ]
    host = replace(zero, offload_optimizer="host")
    case = torch("llama-3-70b", "8xa100-80gb", sharding=host, mem_kind="device", **full, **ONE_ROW)
    on_host = 8 * places(case).host_bytes
    yield (
        "70B in full on 8 cards of 80 GB with ZeRO 3 or FSDP",
        f"{gb(sizes[0])} a card with ZeRO 3, {gb(sizes[1])} with FSDP in 16 bits; "
        f"{gb(case.needed_bytes())} and {gb(on_host)} of the host with the optimizer there",
        f"{sizes[0] / (80 * GB) - 1:+.0%}, {sizes[1] / (80 * GB) - 1:+.0%}",
        words("llama-3-70b", sharding=host, **full),
    )


def mlx_measured_table() -> Iterator[tuple[str, ...]]:
    """The runs of mlx-lm's own trainer that ``bench_training_memory.py`` recorded."""
    from bench_training_memory import predicted

    yield "layers", "runs", "median error", "within 10 %", "from", "to"
    measured = json.loads((ROOT / "tests/data/training_memory_mlx.json").read_text("utf-8"))
    errors: dict[str, list[float]] = {}
    for row in measured["rows"]:
        found = predicted(row)
        name = KINDS[row["kind"]] + (", 12 and 24 layers" if row.get("layers", 0) > 8 else "")
        name += ", 8 layers" if row.get("layers") == 8 else ""
        errors.setdefault(name, []).append(found / row["peak_bytes"] - 1)
    for kind, off in errors.items():
        within = sum(abs(error) < 0.1 for error in off)
        middle = f"{median(map(abs, off)):.1%}"
        yield kind, str(len(off)), middle, str(within), f"{min(off):+.0%}", f"{max(off):+.0%}"


KINDS = {
    "full": "dense",
    "sliding": "sliding windows",
    "latent": "latent attention",
    "moe": "experts",
    "recurrent": "Mamba-2",
    "hybrid": "gated delta rule and attention",
}

TABLES: dict[str, Callable[[], Iterator[tuple[str, ...]]]] = {
    "weights": weights_table,
    "trained": trained_table,
    "optimizers": optimizers_table,
    "logits": logits_table,
    "checkpointing": checkpointing_table,
    "mlx": mlx_table,
    "mlx_measured": mlx_measured_table,
    "sharding": sharding_table,
    "parallel": parallel_table,
    "rules": rules_table,
}


def table(name: str) -> str:
    """The table as it stands on the page, with its comment."""
    head, *rows = TABLES[name]()
    lines = [head, ("---",) * len(head), *rows]
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"<!-- table: {name} -->\n{body}\n"


def rewritten(page: str) -> str:
    return TABLE.sub(lambda found: table(found[1]), page)


def main() -> int:
    old = PAGE.read_text(encoding="utf-8")
    new = rewritten(old)
    if "--check" in sys.argv:
        if new != old:
            print(f"{PAGE} is out of date: python scripts/training_tables.py", file=sys.stderr)
        return int(new != old)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
