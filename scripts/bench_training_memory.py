#!/usr/bin/env python3
"""Measure the peak of ``mlx_lm``'s own trainer on the CPU backend beside what is predicted.

Usage: bench_training_memory.py [-o FILE.json] [KIND ...]

Each case is a process of its own: a small random model of ``tests/models.py``, two iterations of
``mlx_lm.tuner.trainer.train`` with its defaults. ``tests/data/training_memory_mlx.json`` holds what
this printed; ``tests/test_training_mlx.py`` compares the prediction with it.
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
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measured(json.loads(options.case))))
        return 0
    import mlx.core as mx
    import mlx_lm

    rows = []
    for case in cases(options.kinds):
        command = [sys.executable, __file__, "--case", json.dumps(case)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        row = {**case, **json.loads(done.stdout.splitlines()[-1])}
        rows.append(row)
        error = predicted(case) / row["peak_bytes"] - 1
        print(f"{case} {row['peak_bytes']:,} {error:+.1%}", file=sys.stderr)
    if options.output:
        versions = {"mlx": mx.__version__, "mlx_lm": mlx_lm.__version__}
        document = {"versions": versions, "backend": "cpu", "rows": rows}
        options.output.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
