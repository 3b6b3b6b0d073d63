"""A small fine-tuning run with dropout, accumulation and packing, killed and resumed.

``python killed_run.py BASE FOLDER ITERS POINT`` trains in FOLDER, from its newest checkpoint if it
has one, and ends itself with a signal when it comes to POINT.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SAVE_EVERY = 10
AT_RANDOM = "at random"

POINTS = {
    # name: module, function, what is done of the call before the end, and which call it is
    "inside the adapter's write": ("checkpoint", "_write", "half", 1),
    "between adapter and optimizer": ("checkpoint", "_write", "whole", 1),
    "inside the optimizer's write": ("checkpoint", "_write", "half", 2),
    "between optimizer and state": ("checkpoint", "_write", "whole", 2),
    "at the rename": ("checkpoint", "_replace", "none", 1),
    "after the rename": ("checkpoint", "_replace", "whole", 1),
    "at the copy of the adapter": ("run", "save_adapter", "none", 2),
    "in validation": ("train", "validation_loss", "none", 2),
    "before an update": ("train", "_update", "none", 6),
    "after an update": ("train", "_update", "whole", 6),
    "inside a line of the log": ("run", "append", "half", 6),
    "while an old checkpoint is removed": ("checkpoint", "_remove", "half", 1),
    "by an abort in a step": ("train", "loss_and_gradients", "abort", 9),
}


def recipe(iters: int) -> Any:
    from uma.runtime.lora.adapter import Adapter
    from uma.runtime.lora.run import Recipe
    from uma.runtime.lora.train import Course

    return Recipe(
        adapter=Adapter(num_layers=2, rank=2, dropout=0.1),
        course=Course(
            iters=iters,
            batch_size=2,
            grad_accumulation_steps=2,
            seed=3,
            max_grad_norm=1.0,
            pack_tokens=96,
            steps_per_report=10,
            steps_per_eval=10,
            save_every=SAVE_EVERY,
            patience=100,
        ),
        optimizer="adamw",
        learning_rate=3e-3,
        warmup=2,
    )


def train(base: Path, folder: Path, iters: int) -> Any:
    """Begin the run in ``folder``, or resume it."""
    from test_lora_run import examples

    from uma.measurement.run_folder import checkpoints
    from uma.runtime.load import load
    from uma.runtime.lora.run import fine_tune

    return fine_tune(
        load(base),
        examples(24),
        examples(5, 1),
        recipe(iters),
        folder,
        resume=bool(checkpoints(folder)),
        data={},
        blas="any",
        on_event=tell,
    )


def tell(event: dict[str, Any]) -> None:
    if __name__ == "__main__":
        sys.stdout.write(f"{json.dumps(event)}\n")
        sys.stdout.flush()


def end_at(point: str) -> None:
    """Let this process end itself at ``point``."""
    import importlib

    name, function, done, which = POINTS[point]
    module = importlib.import_module(f"uma.runtime.lora.{name}")
    whole, left = getattr(module, function), which

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left:
            return whole(*args, **kwargs)
        if done == "half":
            half(function, whole, args)
        elif done == "whole":
            whole(*args, **kwargs)
        elif done == "abort":
            os.abort()
        os.kill(os.getpid(), 9)
        return None

    setattr(module, function, call)


def half(function: str, whole: Callable[..., Any], args: Any) -> None:
    """What a call that is cut short leaves behind."""
    if function == "_write":
        Path(args[0]).write_bytes(b"x" * 100)
    elif function == "append":
        with (Path(args[0]) / "log.jsonl").open("a") as file:
            file.write('{"event": "trai')
    else:
        (Path(args[0]) / "state.json").unlink()


def killed(base: Path, folder: Path, iters: int, point: str, seconds: float = 0) -> int:
    """Run until ``point``, or with "at random" for some seconds after it began; the exit code."""
    command = [sys.executable, __file__, str(base), str(folder), str(iters), point]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        if point == AT_RANDOM:
            process.stdout.readline()
            time.sleep(seconds)
            process.kill()
        process.stdout.read()
    return process.returncode


if __name__ == "__main__":
    _, asked_base, asked_folder, asked_iters, asked_point = sys.argv
    if asked_point in POINTS:
        end_at(asked_point)
    train(Path(asked_base), Path(asked_folder), int(asked_iters))
