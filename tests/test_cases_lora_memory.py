"""The memory that plain mlx-lm 0.32.2 takes, measured here, beside what ours takes or says.

A case is named by its number in the collection that this project was begun with (V: seen in mlx-lm;
E, F: training, adapters and conversion). Peaks are MLX's counter above what was held before.
"""

import contextlib
import gc
import io
import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_unflatten
from mlx_lm.generate import generate_step
from mlx_lm.tuner.trainer import TrainingArgs, default_loss, iterate_batches, train
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import get_total_parameters, load_model, quantize_model, save_model
from models import CONFIGS, VOCAB_SIZE, build_model, saved_model

from uma.architecture import architecture_from_config
from uma.checkpoint.safetensors import headers_of_folder
from uma.checkpoint.source import locate
from uma.cli.options import RunOptions
from uma.cli.plan import plan_of
from uma.dataset.examples import Example
from uma.machine import read_machine
from uma.quantization import Quantization
from uma.runtime import convert as converting
from uma.runtime.convert import convert_folder
from uma.runtime.forms import quantizer
from uma.runtime.generate import Settings
from uma.runtime.lora.evaluate import score
from uma.runtime.lora.step import Batch, loss_and_gradients
from uma.runtime.measure import PhaseMeter
from uma.runtime.session import Measured, answer, open_session
from uma.units import MIB

SLICE_ROWS = 32  # positions of one slice of the loss: few, as the models are small


def peak_of(run: Callable[[], Any]) -> int:
    """Bytes at the peak of ``run`` above those held before it."""
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    run()
    mx.synchronize()
    return int(mx.get_peak_memory() - before)


def adapted(kind: str = "full", *, bits: int | None = None, dora: bool = False, **more: Any) -> Any:
    dtype = more.pop("dtype", "float32")
    model = build_model(CONFIGS[kind] | more, dtype=dtype)
    if bits is not None:
        nn.quantize(model, 32, bits)
    model.freeze()
    settings = {"rank": 4, "scale": 10.0, "dropout": 0.0}
    linear_to_lora_layers(model, len(model.layers), settings, dora)
    mx.eval(model.parameters())
    model.train()
    return model


def token_rows(tokens: int) -> np.ndarray:
    return np.random.default_rng(0).integers(3, VOCAB_SIZE, (1, tokens + 1))


def theirs(model: Any, tokens: int, tmp_path: Path, *, checkpoint: bool = False) -> int:
    """The peak of one step of ``mlx_lm.tuner.trainer.train``."""
    arguments = TrainingArgs(
        batch_size=1,
        iters=1,
        max_seq_length=tokens + 1,
        adapter_file=str(tmp_path / "adapters.safetensors"),
        grad_checkpoint=checkpoint,
    )
    data = [(token_rows(tokens)[0].tolist(), 0)]
    kind = type(model.layers[0])
    own = kind.__call__
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return peak_of(lambda: train(model, optim.Adam(1e-5), data, args=arguments))
    finally:
        kind.__call__ = own  # grad_checkpoint changes the class for good (V27)


def ours(model: Any, tokens: int, loss_rows: int = SLICE_ROWS) -> int:
    """The peak of one of our steps, its update included."""
    rows, optimizer = token_rows(tokens), optim.Adam(1e-5)
    targets = rows[:, 1:]
    batch = Batch(rows[:, :-1], targets, np.full(targets.shape, 1 / tokens, np.float32))

    def step() -> None:
        _, gradients = loss_and_gradients(model, batch, loss_rows=loss_rows)
        optimizer.update(model, tree_unflatten(list(gradients.items())))
        mx.eval(model.trainable_parameters(), optimizer.state)

    return peak_of(step)


def test_logits_of_all_tokens_are_never_held(tmp_path: Path) -> None:
    """V20, E19: 8 bytes for each token and word, checkpointed or not; of ours one slice."""
    tokens, small, large = 256, VOCAB_SIZE, 8192
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "dtype": "bfloat16"}
    few, many = (adapted(vocab_size=size, **shape) for size in (small, large))
    for checkpoint in (False, True):
        peaks = [theirs(model, tokens, tmp_path, checkpoint=checkpoint) for model in (few, many)]
        assert 7 < (peaks[1] - peaks[0]) / (tokens * (large - small)) < 9
    of_layers = ours(few, 2 * tokens)  # more than a slice takes
    assert ours(many, 2 * tokens) < 1.1 * of_layers


def test_a_short_row_needs_a_fraction_where_checkpointing_saves_little(tmp_path: Path) -> None:
    """V21: 505 MB became 323 at 1,024 tokens, and less is saved of fewer: logits stay."""
    model = adapted(vocab_size=8192, num_hidden_layers=6)
    plain, checkpointed = (theirs(model, 128, tmp_path, checkpoint=c) for c in (False, True))
    assert checkpointed > 0.7 * plain
    assert ours(model, 128) < 0.25 * plain


def test_dora_dequantizes_the_weights_of_one_layer_at_a_time(tmp_path: Path) -> None:
    """V22: DoRA keeps the weights of every 4-bit layer dequantized until its gradient."""
    shape = {"hidden_size": 128, "intermediate_size": 512, "bits": 4}
    more: dict[int, list[int]] = {}
    for layers in (2, 6):
        lora, dora = (adapted(dora=d, num_hidden_layers=layers, **shape) for d in (False, True))
        more[layers] = [theirs(dora, 32, tmp_path) - theirs(lora, 32, tmp_path)]
        more[layers] += [ours(dora, 32) - ours(lora, 32)]
    dequantized = 4 * sum(prod(m["weight"].shape) * 8 for m in quantized_of(lora.layers[0]))
    assert more[6][0] - more[2][0] > 4 * dequantized
    assert more[6][1] - more[2][1] < dequantized
    assert more[6][1] < 2 * dequantized


def quantized_of(layer: nn.Module) -> list[nn.Module]:
    return [m for _, m in layer.named_modules() if isinstance(m, nn.QuantizedLinear)]


def test_states_of_a_recurrence_are_not_kept_for_every_token(tmp_path: Path) -> None:
    """E5: a hybrid takes several times what a dense model does, and more for each token."""
    tokens = 128
    hybrid, dense = adapted("hybrid"), adapted()
    assert theirs(hybrid, tokens, tmp_path) > 4 * theirs(dense, tokens, tmp_path)
    assert ours(hybrid, tokens) < 1.5 * ours(dense, tokens)


def test_more_batches_of_a_validation_set_take_no_more_memory() -> None:
    """V23, E10: losses that are only summed keep every batch, unlike mlx_lm's ``evaluate``."""
    model, length = build_model(CONFIGS["full"]), 32
    rng = np.random.default_rng(0)
    rows = rng.integers(3, VOCAB_SIZE, (64, length)).tolist()

    def lazily(count: int) -> None:
        data = [(row, 0) for row in rows[:count]]
        losses = [default_loss(model, *b)[0] for b in iterate_batches(data, 1, length)]
        mx.eval(sum(losses))

    def batch_by_batch(count: int) -> None:
        examples = [Example(n, tuple(row), (True,) * length, {}) for n, row in enumerate(rows)]
        score(model, examples[:count], 1)

    few, many = (peak_of(lambda n=n: lazily(n)) for n in (4, 64))
    assert many > 3 * few
    few, many = (peak_of(lambda n=n: batch_by_batch(n)) for n in (4, 64))
    assert many < 1.2 * few


WIDE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "head_dim": 64}


def test_a_model_is_quantized_and_written_part_by_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V24, F6, F8: quantized lazily, source and result are there together."""
    folder = saved_model("full", tmp_path / "source", dtype="bfloat16", **WIDE)
    source = sum(header.size_bytes for header in headers_of_folder(folder))

    def quantized(*, lazy: bool) -> tuple[nn.Module, Any]:
        model, config = load_model(folder, lazy=lazy)
        found: tuple[nn.Module, Any] = quantize_model(model, config, 64, 4)
        return found

    def converted() -> None:
        model, _ = quantized(lazy=True)
        save_model(tmp_path / "theirs", model, donate_model=True)  # as ``mlx_lm.convert`` does

    monkeypatch.setattr(converting, "SHARD_BYTES", source // 32)
    to_four_bits = Quantization(4, 64)
    ours = peak_of(lambda: convert_folder(folder, tmp_path / "ours", quantization=to_four_bits))
    result = sum(header.size_bytes for header in headers_of_folder(tmp_path / "ours"))
    assert ours < result // 2
    assert peak_of(converted) > 2 * result
    at_once = peak_of(lambda: mx.eval(quantized(lazy=False)[0].parameters()))
    assert at_once > source + result // 2


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4"])
def test_a_large_matrix_is_quantized_in_slices(mode: str) -> None:
    """F7: one matrix in mxfp4 asked for a buffer of 33 GB: 18 times its size at once."""
    layer = nn.Linear(1024, 1024, bias=False)
    mx.eval(layer.parameters())
    form = Quantization(4, 32 if mode == "mxfp4" else 16, mode)  # type: ignore[arg-type]
    whole = peak_of(lambda: mx.eval(layer.to_quantized(**form.to_config()).parameters()))
    assert whole > 15 * layer.weight.nbytes
    convert = quantizer(nn.Module(), form)
    assert peak_of(lambda: mx.eval(convert("layer", layer).parameters())) < layer.weight.nbytes


def test_parameters_are_counted_by_their_shapes(tmp_path: Path) -> None:
    """V25: packed numbers, scales and biases are not the weights that they stand for."""
    form = {"bits": 4, "group_size": 32, "mode": "affine"}
    folder = saved_model("full", tmp_path, quantization=form)
    stored = sum(prod(t.shape) for header in headers_of_folder(folder) for t in header.tensors)
    weights = get_total_parameters(build_model(CONFIGS["full"]))
    assert stored < 0.2 * weights
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert architecture_from_config(config).num_parameters == weights


def test_the_chunk_of_a_prompt_follows_from_the_budget(tmp_path: Path) -> None:
    """V26: 256, 1,024 and 4,096 tokens at once took 26, 84 and 315 MB."""
    folder, budget = saved_model("full", tmp_path), 12 * MIB
    prompt = [3 + n % 300 for n in range(1024)]

    def first_token(step: int) -> None:
        model, _ = load_model(folder)
        next(generate_step(mx.array(prompt), model, max_tokens=1, prefill_step_size=step))

    small, large = (peak_of(lambda n=n: first_token(n)) for n in (256, 1024))
    assert large > max(2 * small, 1.5 * budget)
    asked = RunOptions(context=len(prompt) + 8, budget_bytes=budget)
    plan = plan_of(asked, locate(str(folder)), read_machine()).plan
    step = plan.workload.prefill_step_size
    assert step < 1024

    def run() -> None:
        settings = Settings(max_tokens=8, prefill_step_size=step)
        with open_session(plan, folder) as session:
            list(answer(session, prompt, settings, Measured(PhaseMeter())))

    assert peak_of(run) < budget
