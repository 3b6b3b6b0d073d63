"""Kill a small fine-tuning run at twenty moments, resume it each time, compare its end.

    PYTHONPATH=.:tests python scripts/kill_lora.py [--random 7] [--iters 200] [--seed 0]

Thirteen moments are named (``tests/killed_run.py``), the others at random. Dropout, accumulation
and packing are on, checkpoints 10 iterations apart. Prints where each kill left the run, and
whether adapter, best adapter and optimizer are equal, bit for bit, to those of a run left alone.
"""

import argparse
import random
import sys
import tempfile
from pathlib import Path

import killed_run
from models import saved_model

from uma.measurement.run_folder import checkpoints, read_state


def same(one: Path, other: Path) -> bool:
    import mlx.core as mx

    a, b = mx.load(str(one)), mx.load(str(other))
    return a.keys() == b.keys() and all(mx.array_equal(a[name], b[name]) for name in a)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--random", type=int, default=7)
    parser.add_argument("--iters", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    rng = random.Random(asked.seed)
    points = [*killed_run.POINTS, *[killed_run.AT_RANDOM] * asked.random]
    rng.shuffle(points)
    with tempfile.TemporaryDirectory() as home:
        base = saved_model("full", Path(home, "model"))
        whole, parts = Path(home, "whole"), Path(home, "parts")
        killed_run.train(base, whole, asked.iters)
        for point in points:
            code = killed_run.killed(base, parts, asked.iters, point, rng.uniform(0, 1.5))
            kept = checkpoints(parts)
            at = read_state(kept[-1]).progress.iteration if kept else 0
            print(f"{point:36} code {code:3}, continues from iteration {at}")
            if code not in (-9, -6):
                return print("it came to its end before that: give more --iters") or 1
        killed_run.train(base, parts, asked.iters)
        last = checkpoints(whole)[-1].relative_to(whole)
        files = (
            "adapters.safetensors",
            "best/adapters.safetensors",
            last / "optimizer.safetensors",
        )
        found = {str(name): same(whole / name, parts / name) for name in files}
    for name, equal in found.items():
        print(f"{name}: {'equal' if equal else 'DIFFERS'}")
    return 0 if all(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
