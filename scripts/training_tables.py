"""Write the tables of docs/training-memory.md from the library; ``--check`` compares.

A table follows a comment with its name, such as ``<!-- table: weights -->``.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from training_page.cases import (  # noqa: E402
    MIXED,
    ONE_ROW,
    PLAIN,
    PREPARED,
    architecture_of,
    checkpointed,
    gb,
    mlx,
    term,
    torch,
)
from training_page.rules import rules_table  # noqa: E402

from uma.memory.optimizer_states import mlx_states, torch_states  # noqa: E402
from uma.plan.training.changes import near_root  # noqa: E402
from uma.plan.training.checks import MLX_OPTIMIZERS  # noqa: E402
from uma.plan.training.places import places  # noqa: E402
from uma.plan.training.stack import Stack  # noqa: E402
from uma.workload import OPTIMIZERS, Sharding  # noqa: E402

PAGE = ROOT / "docs" / "training-memory.md"
TABLE = re.compile(r"<!-- table: (\w+) -->\n(?:\|[^\n]*\n)+")


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
            none, every, fourth = checkpointed(model, tokens, (0, 1, 4))
            inside = none / layers / (2 * tokens * architecture.hidden_size)
            saved = f"{1 - every / none:.0%}"
            yield f"{name}, {tokens:,}", gb(none), f"{inside:.0f}", gb(every), gb(fourth), saved


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
