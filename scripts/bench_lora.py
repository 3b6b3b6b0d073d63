"""Peak memory and time of a training step, against mlx_lm's trainer in the same process.

    PYTHONPATH=.:tests python scripts/bench_lora.py [KIND ...] [-o FILE.json]

Each kind is a small model with a vocabulary of 131,072 and 2 rows of 2,048 tokens, in float32. The
peak is MLX's own counter less what was held before the step. The trainers take turns, so that
whatever else the machine does befalls all of them; the figure is the median. Loss and gradients
are compared with mlx_lm's at a quarter of the length.

Where ``mlx_train_perf`` is installed, mlx_lm's trainer runs once more with its loss in chunks, and
checkpointed; its other parts are Metal kernels. It asks for mlx 0.32.0, so that beside a later one
it is ``pip install --no-deps mlx-train-perf``.
"""

import argparse
import contextlib
import io
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from uma.paths import cache_folder
from uma.runtime.blas import prepare_cpu

VOCABULARY, LENGTH, ROWS = 131_072, 2_048, 2
WARM_UP = 16  # tokens of a row, before anything is measured
SMALL_VOCABULARY = 8_192
_SMALL = {"vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 1024}
_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("full", _SMALL | _HEADS | {"num_hidden_layers": 6}),
    "sliding": ("sliding", _SMALL | _HEADS | {"sliding_window": 512}),
    "experts": ("moe", _SMALL | _HEADS | {"moe_intermediate_size": 512}),
    "layers": ("full", _SMALL | _HEADS | {"num_hidden_layers": 12, "vocab_size": SMALL_VOCABULARY}),
    "recurrent": ("recurrent", {"vocab_size": VOCABULARY}),
}
ADAPTER = {"rank": 8, "scale": 20.0, "dropout": 0.0}


class Dataset:
    """Random rows as mlx-lm's trainer takes them."""

    def __init__(self, length: int) -> None:
        import numpy as np

        # One token more than the inputs: mlx-lm cuts the rows at the longest allowed length.
        rng = np.random.default_rng(0)
        self.rows = rng.integers(3, VOCABULARY, (ROWS, length + 1)).tolist()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[list[int], int]:
        return self.rows[index], 0


def adapted_model(kind: str) -> Any:
    """With factors that are not zero, so that every gradient is something."""
    import mlx.core as mx
    from mlx.utils import tree_map_with_path
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from models import CONFIGS, build_model

    base, overrides = KINDS[kind]
    model = build_model(CONFIGS[base] | overrides)
    model.freeze()
    linear_to_lora_layers(model, len(model.layers), ADAPTER)

    def drawn(name: str, value: mx.array) -> mx.array:
        return 0.05 * mx.random.normal(value.shape) if name.endswith("lora_b") else value

    model.update(tree_map_with_path(drawn, model.trainable_parameters()))
    mx.eval(model.parameters())
    model.train()
    return model


def theirs(model: Any, length: int, *, checkpoint: bool, loss: Any = None) -> list[float]:
    """Seconds of a step of ``mlx_lm.tuner.trainer.train``."""
    import mlx.optimizers as optim
    from mlx_lm.tuner.callbacks import TrainingCallback
    from mlx_lm.tuner.trainer import TrainingArgs, default_loss, train

    seconds: list[float] = []

    class Times(TrainingCallback):  # type: ignore[misc]
        def on_train_loss_report(self, train_info: dict[str, Any]) -> None:
            seconds.append(1 / train_info["iterations_per_second"])

    layer_class = type(model.layers[0])
    own_call = layer_class.__call__
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        arguments = TrainingArgs(
            batch_size=ROWS,
            iters=1,
            steps_per_report=1,
            max_seq_length=length + 1,
            adapter_file=f"{folder}/adapters.safetensors",
            grad_checkpoint=checkpoint,
        )
        adam = optim.Adam(learning_rate=1e-5)
        train(
            model,
            adam,
            Dataset(length),
            args=arguments,
            loss=loss or default_loss,
            training_callback=Times(),
        )
    layer_class.__call__ = own_call  # grad_checkpoint changes the class for good
    return seconds


def batch_of_rows(data: Dataset) -> Any:
    """All rows, each token of equal weight, as our step takes them."""
    import numpy as np

    from uma.runtime.lora.step import Batch

    rows = np.array(data.rows)
    targets = rows[:, 1:]
    return Batch(rows[:, :-1], targets, np.full(targets.shape, 1 / targets.size, np.float32))


def ours(model: Any, length: int) -> list[float]:
    """Seconds of one of our steps, the optimizer's update included."""
    import mlx.core as mx
    import mlx.optimizers as optim
    from mlx.utils import tree_unflatten

    from uma.runtime.lora.step import loss_and_gradients

    adam, batch = optim.Adam(learning_rate=1e-5), batch_of_rows(Dataset(length))
    start = time.perf_counter()
    _, gradients = loss_and_gradients(model, batch)
    adam.update(model, tree_unflatten(list(gradients.items())))
    mx.eval(model.trainable_parameters(), adam.state)
    return [time.perf_counter() - start]


def differences(model: Any, data: Dataset) -> dict[str, float]:
    """How far loss and gradients are from mlx_lm's, each over its norm; of gradients the worst."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten
    from mlx_lm.tuner.trainer import default_loss

    from uma.runtime.lora.step import loss_and_gradients

    rows = mx.array(data.rows)
    lengths = mx.array([[0, rows.shape[1]]] * rows.shape[0])
    (loss, _), tree = nn.value_and_grad(model, default_loss)(model, rows, lengths)
    wanted = dict(tree_flatten(tree))
    mx.eval(loss, wanted)
    own, gradients = loss_and_gradients(model, batch_of_rows(data))
    norm = mx.linalg.norm
    worst: Any = max((norm(gradients[n] - g) / norm(g)).item() for n, g in wanted.items())
    return {"loss": abs(own.item() / loss.item() - 1), "gradient": worst}


def peer_loss(model: Any) -> Any:
    """The loss of ``mlx_train_perf``, or why there is none."""
    try:
        from mlx_train_perf.adapters.mlx_lm import make_loss_fn
        from mlx_train_perf.errors import MlxTrainPerfError
    except ImportError:
        return "mlx_train_perf is not installed"
    try:
        return make_loss_fn(model, impl="chunked")
    except MlxTrainPerfError as error:
        return str(error)


def measured(kind: str, length: int, turns: int) -> dict[str, Any]:
    """Peak bytes above the resting weights and median seconds a step of the trainers."""
    import mlx.core as mx

    model = adapted_model(kind)
    exact = differences(model, Dataset(length // 4))
    runs: dict[str, Callable[[int], list[float]]] = {
        "uma": lambda n: ours(model, n),
        "mlx_lm_checkpoint": lambda n: theirs(model, n, checkpoint=True),
        "mlx_lm": lambda n: theirs(model, n, checkpoint=False),
    }
    peer = peer_loss(model)
    if callable(peer):
        runs["mlx_train_perf"] = lambda n: theirs(model, n, checkpoint=True, loss=peer)
    else:
        print(f"{kind}: no mlx_train_perf: {peer}", file=sys.stderr)
    for run in runs.values():
        run(WARM_UP)  # compiles kernels
    peaks: dict[str, int] = dict.fromkeys(runs, 0)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(turns):
        for name, run in runs.items():
            mx.clear_cache()
            resting = mx.get_active_memory()
            mx.reset_peak_memory()
            seconds[name] += run(length)
            peaks[name] = max(peaks[name], mx.get_peak_memory() - resting)
            print(kind, name, seconds[name][-1], peaks[name] / 2**20, file=sys.stderr, flush=True)

    def time_share(other: str) -> float:
        pairs = zip(seconds["uma"], seconds[other], strict=True)
        return round(statistics.median(a / b for a, b in pairs), 3)

    others = [name for name in runs if name != "uma"]
    return {
        "kind": kind,
        "length": length,
        "load": round(os.getloadavg()[0], 1),
        "relative_difference": exact,
        "peak_bytes": peaks,
        "s_per_step": {name: round(statistics.median(s), 3) for name, s in seconds.items()},
        "peak_share": {name: round(peaks["uma"] / peaks[name], 4) for name in others},
        "time_share": {name: time_share(name) for name in others},
    }


def packing(examples: int) -> dict[str, Any]:
    """Real tokens for a second of the processor, and the loss, of short examples: apart and packed.

    Seconds of the processor, since another program may take a core meanwhile. The vocabulary is
    small: the head passes no padding over in either case.
    """
    import mlx.core as mx
    import numpy as np

    from uma.dataset.batches import batch_plan
    from uma.dataset.examples import Example
    from uma.runtime.lora.step import loss_and_gradients
    from uma.runtime.lora.train import batch_of, inputs_of, targets_of, units_of

    model = adapted_model("layers")
    rng = np.random.default_rng(0)
    rows = [
        Example(n, tuple(rng.integers(3, SMALL_VOCABULARY, length).tolist()), (True,) * length, {})
        for n, length in enumerate(rng.integers(6, 21, examples).tolist())
    ]
    found: dict[str, Any] = {"examples": examples, "tokens_per_example": "6 to 20"}
    # Apart, packed, and apart again: the machine may have become slower or faster meanwhile.
    for name, pack_tokens, batch_size in (("apart", None, 4), ("packed", 512, 1)) * 2:
        units = units_of(rows, pack_tokens)
        total, tokens, start = 0.0, 0, time.process_time()
        for batch in batch_plan(list(map(inputs_of, units)), batch_size, seed=0, epoch=0):
            chosen = [units[n] for n in batch]
            loss, _ = loss_and_gradients(model, batch_of(chosen))
            total, tokens = total + loss.item(), tokens + targets_of(chosen)
        mx.synchronize()
        rate = tokens / (time.process_time() - start)
        found.setdefault(f"{name}_tokens_per_cpu_s", []).append(round(rate, 1))
        found[f"{name}_loss"] = total / tokens
    rates = (found["packed_tokens_per_cpu_s"], found["apart_tokens_per_cpu_s"])
    found["speedup"] = round(min(a / b for a, b in zip(*rates, strict=True)), 2)
    return found


def results(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if options.packing:
        yield packing(options.packing)
    every = [] if options.packing else [kind for kind in KINDS if kind != "layers"]
    for kind in options.kinds or every:
        yield measured(kind, options.length, options.turns)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", default=[])
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--packing", type=int, metavar="EXAMPLES", help="This comparison alone.")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    blas = prepare_cpu(cache_folder())
    import mlx.core as mx
    import mlx_lm

    rows = []
    for row in results(options):
        rows.append(row)
        print(json.dumps(row), flush=True)
    if options.output:
        versions = {"mlx": mx.__version__, "mlx_lm": mlx_lm.__version__, "blas": blas.name}
        document = {"versions": versions, "backend": "cpu", "rows": rows}
        options.output.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
