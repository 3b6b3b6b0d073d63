#!/usr/bin/env python3
"""Measure the peak of a trainer on the CPU backend beside what is predicted.

Usage: bench_training_memory.py [--trainer mlx_lm|uma] [-o FILE.json] [KIND ...]

Small random models of ``tests/models.py``. Of ``mlx_lm`` each case is a process of its own: two
iterations of ``mlx_lm.tuner.trainer.train`` with its defaults. Of ``uma`` the peak is that of some
steps after a first one. ``tests/data/training_memory_{mlx,own}.json`` hold what this printed;
``tests/test_training_{mlx,own}.py`` compare the predictions with them.
"""

import argparse
import contextlib
import io
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

KINDS = ("full", "sliding", "latent", "moe", "recurrent", "hybrid")
RANK, BATCH_SIZE, ITERATIONS = 8, 2, 2
LENGTHS = (257, 513)
GROUP_SIZE = 32


def cases(kinds: list[str]) -> list[dict[str, Any]]:
    """Every kind of layer by method, with and without checkpointing; no DoRA of experts."""
    few = [
        {"kind": kind, "length": length, "method": method, "checkpoint": checkpoint}
        for length in LENGTHS
        for kind in kinds
        for method in ("lora", "dora", "full")
        for checkpoint in (False, True)
        if not (method == "dora" and kind in ("latent", "moe", "hybrid"))
        if not (length > LENGTHS[0] and kind in ("recurrent", "hybrid"))
    ]
    return [*few, *deep_cases(kinds)]


def deep_cases(kinds: list[str]) -> list[dict[str, Any]]:
    """More layers; with all tokens of a gated delta rule in the graph, fewer of both."""
    return [
        {"kind": kind, "length": length, "method": method, "checkpoint": checkpoint}
        | {"layers": layers}
        for kind in kinds
        for layers, length in ([(8, 129)] if kind == "hybrid" else [(12, 257), (24, 257)])
        for method in ("lora", "full")
        for checkpoint in (False, True)
    ]


def config_of(case: dict[str, Any]) -> dict[str, Any]:
    from models import CONFIGS

    config = CONFIGS[case["kind"]]
    return config | {"num_hidden_layers": case.get("layers", config["num_hidden_layers"])}


def own_cases(kinds: list[str]) -> list[dict[str, Any]]:
    """A grid of shapes around one case of each kind of layer, narrow layers and wide ones."""
    first = {"method": "lora", "rank": 8, "bits": None, "batch": 2, "length": 256, "vocab": 384}
    first |= {"optimizer": "adam", "layers": 4}
    changes: list[dict[str, Any]] = [{}, {"rank": 64}, {"bits": 4}, {"method": "full"}]
    changes += [{"batch": 1, "length": 1024}, {"batch": 4, "length": 128, "vocab": 8192}]
    dense: list[dict[str, Any]] = [
        {"method": "dora"},
        {"method": "dora", "bits": 4},
        {"layers": 12},
    ]
    dense += [{"batch": 8, "length": 64}, {"batch": 1, "length": 2048}, {"vocab": 32768}]
    small = {"method": "full", "batch": 1, "length": 32, "layers": 6}
    dense += [small | {"optimizer": name} for name in OPTIMIZERS]
    return [
        first | change | {"kind": kind}
        for kind in kinds
        for change in [*changes, *(dense if kind == "full" else []), *wide_changes(kind)]
        if not (change.get("length", 0) > 256 and kind in ("recurrent", "hybrid"))
        or "wide" in change
    ]


def wide_changes(kind: str) -> list[dict[str, Any]]:
    """Wider layers: methods, shapes, optimizers, accumulation, packing, slices."""
    changes: list[dict[str, Any]] = [{}, {"bits": 4}, {"method": "full"}, {"vocab": 8192}]
    if kind in ("full", "sliding", "recurrent"):
        changes += [{"method": "dora"}, {"method": "dora", "bits": 4}]
    changes += [{"batch": 1, "length": n} for n in (256, 512, 1024)]
    changes += [{"length": 512}, {"batch": 4}]
    changes += [{"method": "full", "optimizer": name} for name in ("adamw8bit", "adafactor")]
    changes += [{"accumulation": 2}, {"method": "full", "accumulation": 2}]
    changes += [{"loss_slice": 1 << 18}]
    if kind in ("full", "sliding", "recurrent"):  # MLX's CPU backend gathers matrices in float32
        changes += [{"dtype": "bfloat16"}, {"dtype": "bfloat16", "method": "full"}]
    if kind not in ("recurrent", "hybrid"):
        changes += [{"attention_slice": 1 << 18}, {"length": 512, "packed": 100}]
    if kind in ("full", "recurrent"):
        changes += [{"batch": 1, "length": 2048}, {"vocab": 131_072}]
    return [{"wide": True, "vocab": 1024, "optimizer": "adamw"} | change for change in changes]


WIDE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "head_dim": 32,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "sliding_window": 128,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "num_heads": 8,
    "state_size": 64,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
}
"""Of ``own_cases``, where a kind has the key. Mamba-2's heads and latent ones follow from it."""

OPTIMIZERS = ("adam", "adamw", "sgd", "lion", "adafactor", "muon")


def own_config(case: dict[str, Any]) -> dict[str, Any]:
    from models import CONFIGS

    config = CONFIGS[case["kind"]]
    if case.get("wide"):
        own = {"num_key_value_heads": 8} if case["kind"] == "latent" else {}
        config = config | {key: WIDE[key] for key in WIDE if key in config} | own
    layers = case["layers"] if case["kind"] == "full" else config["num_hidden_layers"]
    return {**config, "vocab_size": case["vocab"], "num_hidden_layers": layers}


def own_measured(case: dict[str, Any]) -> dict[str, Any]:
    """The peak of our steps, updates included, and what was there before.

    Of three steps or, as evaluation runs ahead by chance, as many as take ten seconds.
    """
    import mlx.core as mx
    import mlx.nn as nn
    import numpy as np
    from mlx.utils import tree_unflatten
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from models import build_model

    from uma.runtime.lora.optimizer import make_optimizer
    from uma.runtime.lora.step import Batch, loss_and_gradients

    model = build_model(own_config(case), dtype=case.get("dtype", "float32"))
    if case["bits"]:
        nn.quantize(model, GROUP_SIZE, case["bits"])
    model.freeze()
    if case["method"] == "full":
        for layer in model.layers:
            layer.unfreeze()
    else:
        settings = {"rank": case["rank"], "scale": 20.0, "dropout": 0.0}
        linear_to_lora_layers(model, len(model.layers), settings, case["method"] == "dora")
    mx.eval(model.parameters())
    model.train()
    rows = np.random.default_rng(0).integers(3, case["vocab"], (case["batch"], case["length"] + 1))
    targets = rows[:, 1:]
    weights = np.full(targets.shape, 1 / targets.size, np.float32)
    segments = None
    if "packed" in case:
        segments = np.broadcast_to(np.arange(targets.shape[1]) // case["packed"], targets.shape)
    batch = Batch(rows[:, :-1], targets, weights, segments)
    slices: dict[str, int] = {}
    if "loss_slice" in case:
        slices["loss_rows"] = case["loss_slice"] // (4 * case["vocab"])
    if "attention_slice" in case:
        slices["attention_slice_bytes"] = case["attention_slice"]
    optimizer = make_optimizer(case["optimizer"], 1e-5)

    def step() -> None:
        gradients: dict[str, Any] = {}
        for _ in range(case.get("accumulation", 1)):
            _, found = loss_and_gradients(model, batch, **slices)
            if gradients:
                found = {name: gradients[name] + value for name, value in found.items()}
                mx.eval(found)
            gradients = found
        optimizer.update(model, tree_unflatten(list(gradients.items())))
        mx.eval(model.trainable_parameters(), optimizer.state)

    step()
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    started = time.perf_counter()
    done = 0
    while done < 3 or (done < 20 and time.perf_counter() - started < 10):
        step()
        done += 1
    return {"before_bytes": before, "peak_bytes": mx.get_peak_memory()}


def own_predicted(case: dict[str, Any]) -> int:
    """The estimate of the same case."""
    from uma.architecture import architecture_from_config
    from uma.engines.mlx_own_step import own_training_terms
    from uma.ledger import peak
    from uma.memory.weights import weight_bytes
    from uma.quantization import Quantization
    from uma.workload import TrainingWorkload

    architecture = architecture_from_config(own_config(case))
    form = Quantization(case["bits"], GROUP_SIZE) if case["bits"] else None
    workload = TrainingWorkload(
        method=case["method"],
        rank=case["rank"],
        num_layers=None,
        batch_size=case["batch"],
        max_seq_length=case["length"] + 1,
        dtype=case.get("dtype", "float32"),
        quantized=f"{case['bits']}bit" if case["bits"] else "",
        optimizer=case["optimizer"].replace("adamw8bit", "adamw-8bit"),
        grad_accumulation_steps=case.get("accumulation", 1),
    )
    names = {"loss_slice": "loss_slice_bytes", "attention_slice": "attention_slice_bytes"}
    names |= {"packed": "packed_tokens"}
    more = {name: case[key] for key, name in names.items() if key in case}
    weights = weight_bytes(architecture, form, workload.dtype_bytes)
    return peak(own_training_terms(architecture, weights, workload, backend="cpu", **more))[1]


class Rows:
    """A dataset of random rows of one length, as mlx-lm's trainer takes it."""

    def __init__(self, count: int, length: int, vocabulary: int) -> None:
        import numpy as np

        rng = np.random.default_rng(0)
        self.rows = rng.integers(3, vocabulary, (count, length)).tolist()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[list[int], int]:
        return self.rows[index], 0


def measured(case: dict[str, Any]) -> dict[str, Any]:
    """Train as asked; MLX's counters before and after, and at the peak."""
    import mlx.core as mx
    import mlx.optimizers as optim
    from mlx_lm.tuner.trainer import TrainingArgs, train
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from models import build_model

    config = config_of(case)
    model = build_model(config)
    model.freeze()
    if case["method"] == "full":
        for layer in model.layers:
            layer.unfreeze()
    else:
        settings = {"rank": RANK, "scale": 20.0, "dropout": 0.0}
        linear_to_lora_layers(model, len(model.layers), settings, case["method"] == "dora")
    mx.eval(model.parameters())
    rows = Rows(4, case["length"], config["vocab_size"])
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        arguments = TrainingArgs(
            batch_size=BATCH_SIZE,
            iters=ITERATIONS,
            max_seq_length=case["length"],
            adapter_file=f"{folder}/adapters.safetensors",
            grad_checkpoint=case["checkpoint"],
        )
        train(model, optim.Adam(learning_rate=1e-5), rows, args=arguments)
    return {"before_bytes": before, "peak_bytes": mx.get_peak_memory()}


def measured_apart(case: dict[str, Any]) -> dict[str, Any]:
    """``measured`` in a process of its own."""
    command = [sys.executable, __file__, "--case", json.dumps(case)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def predicted(case: dict[str, Any]) -> int:
    """The estimate of the same case."""
    from uma.architecture import architecture_from_config
    from uma.engines.mlx_training import training_terms
    from uma.ledger import peak
    from uma.memory.weights import weight_bytes
    from uma.workload import TrainingWorkload

    architecture = architecture_from_config(config_of(case))
    workload = TrainingWorkload(
        method=case["method"],
        rank=RANK,
        num_layers=None,
        batch_size=BATCH_SIZE,
        max_seq_length=case["length"],
        grad_checkpoint=int(case["checkpoint"]),
        dtype="float32",
    )
    weights = weight_bytes(architecture, None, 4)
    return peak(training_terms(architecture, weights, workload, backend="cpu"))[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--trainer", choices=["mlx_lm", "uma"], default="mlx_lm")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measured(json.loads(options.case))))
        return 0
    own = options.trainer == "uma"
    if own:  # as ``uma lora`` does
        from uma.paths import cache_folder
        from uma.runtime.blas import prepare_cpu

        prepare_cpu(cache_folder())
    import mlx.core as mx
    import mlx_lm

    rows = []
    for case in own_cases(options.kinds) if own else cases(options.kinds):
        row = {**case, **(own_measured(case) if own else measured_apart(case))}
        rows.append(row)
        error = (own_predicted if own else predicted)(case) / row["peak_bytes"] - 1
        print(f"{case} {row['peak_bytes']:,} {error:+.1%}", file=sys.stderr, flush=True)
    if options.output:
        versions = {"mlx": mx.__version__, "mlx_lm": mlx_lm.__version__}
        document = {"versions": versions, "backend": "cpu", "rows": rows}
        options.output.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
