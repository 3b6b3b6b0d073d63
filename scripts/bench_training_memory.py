#!/usr/bin/env python3
"""Measure the peak of a trainer on the CPU backend beside what is predicted.

Usage: bench_training_memory.py [--trainer mlx_lm|uma] [-o FILE.json] [KIND ...]

Small random models of ``tests/models.py``. Of ``mlx_lm`` each case is a process of its own: two
iterations of ``mlx_lm.tuner.trainer.train`` with its defaults. Of ``uma`` the peak is that of three
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
    return [
        {"kind": kind, "length": length, "method": method, "checkpoint": checkpoint}
        for length in LENGTHS
        for kind in kinds
        for method in ("lora", "dora", "full")
        for checkpoint in (False, True)
        if not (method == "dora" and kind in ("latent", "moe", "hybrid"))
        if not (length > LENGTHS[0] and kind in ("recurrent", "hybrid"))
    ]


def own_cases(kinds: list[str]) -> list[dict[str, Any]]:
    """A grid of shapes around one case of each kind of layer."""
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
        for change in [*changes, *(dense if kind == "full" else [])]
        if not (change.get("length", 0) > 256 and kind in ("recurrent", "hybrid"))
    ]


OPTIMIZERS = ("adam", "adamw", "sgd", "lion", "adafactor", "muon")


def own_config(case: dict[str, Any]) -> dict[str, Any]:
    from models import CONFIGS

    config = CONFIGS[case["kind"]]
    layers = case["layers"] if case["kind"] == "full" else config["num_hidden_layers"]
    return {**config, "vocab_size": case["vocab"], "num_hidden_layers": layers}


def own_measured(case: dict[str, Any]) -> dict[str, Any]:
    """The peak of three of our steps, updates included, and what was there before."""
    import mlx.core as mx
    import mlx.nn as nn
    import numpy as np
    from mlx.utils import tree_unflatten
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from models import build_model

    from uma.runtime.lora.optimizer import make_optimizer
    from uma.runtime.lora.step import Batch, loss_and_gradients

    model = build_model(own_config(case))
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
    optimizer = make_optimizer(case["optimizer"], 1e-5)

    def step() -> None:
        _, gradients = loss_and_gradients(model, Batch(rows[:, :-1], targets, weights))
        optimizer.update(model, tree_unflatten(list(gradients.items())))
        mx.eval(model.trainable_parameters(), optimizer.state)

    step()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(3):
        step()
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
        dtype="float32",
        quantized=f"{case['bits']}bit" if case["bits"] else "",
        optimizer=case["optimizer"],
    )
    weights = weight_bytes(architecture, form, 4)
    return peak(own_training_terms(architecture, weights, workload, backend="cpu"))[1]


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
    from models import CONFIGS, build_model

    config = CONFIGS[case["kind"]]
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
    from models import CONFIGS

    from uma.architecture import architecture_from_config
    from uma.engines.mlx_training import training_terms
    from uma.ledger import peak
    from uma.memory.weights import weight_bytes
    from uma.workload import TrainingWorkload

    architecture = architecture_from_config(CONFIGS[case["kind"]])
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
    import mlx.core as mx
    import mlx_lm

    own = options.trainer == "uma"
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
