"""A fine-tuning run: what it writes, what mlx_lm makes of it, and what it survives."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from models import CONFIGS, VOCAB_SIZE, build_model, saved_model
from safetensors.numpy import save_file
from test_lora_plan import case, rows

from uma.checkpoint.adapter import WEIGHTS
from uma.cli import main
from uma.cli.lora.result import _measured
from uma.dataset.examples import Example
from uma.errors import CheckpointError, StorageError, UnsupportedModel, UsageError
from uma.measurement.run_folder import checkpoints, events
from uma.plan.fine_tuning import Cut, plan_fine_tuning
from uma.runtime.load import LoadedModel, load
from uma.runtime.lora.adapter import Adapter, adapted, load_adapter, put_adapter
from uma.runtime.lora.batching import batch_of
from uma.runtime.lora.run import Recipe, fine_tune, fingerprint
from uma.runtime.lora.train import Course, Diverged, validation_loss

DATA = {"train_data": "x"}


def examples(count: int = 12, seed: int = 0) -> list[Example]:
    """Random rows of many lengths, their first three tokens not supervised."""
    rng = np.random.default_rng(seed)
    rows = [tuple(rng.integers(3, VOCAB_SIZE, rng.integers(8, 40)).tolist()) for _ in range(count)]
    return [
        Example(line, row, tuple(n > 2 for n in range(len(row))), {})
        for line, row in enumerate(rows, start=1)
    ]


def recipe(iters: int = 12, optimizer: str = "adamw", **adapter: Any) -> Recipe:
    defaults: dict[str, Any] = {"num_layers": 2, "rank": 2, "dropout": 0.1}
    return Recipe(
        adapter=Adapter(**defaults | adapter),
        course=Course(
            iters=iters,
            batch_size=2,
            grad_accumulation_steps=2,
            seed=3,
            max_grad_norm=1.0,
            steps_per_report=4,
            steps_per_eval=4,
            save_every=4,
        ),
        optimizer=optimizer,
        learning_rate=1e-2,
        warmup=2,
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model("full", tmp_path_factory.mktemp("base") / "model")


def trained(base: Path, folder: Path, asked: Recipe, **options: Any) -> tuple[LoadedModel, Any]:
    loaded = load(base)
    defaults: dict[str, Any] = {
        "resume": False,
        "data": DATA,
        "blas": "any",
        "on_event": lambda _: None,
    }
    validation = options.pop("validation", examples(5, 1))
    result = fine_tune(loaded, examples(), validation, asked, folder, **defaults | options)
    return loaded, result


def tensors(folder: Path) -> dict[str, list[Any]]:
    return {name: value.tolist() for name, value in mx.load(str(folder / WEIGHTS)).items()}


def stop_after(iteration: int, event: str = "checkpoint") -> dict[str, Any]:
    """Options of a run that is stopped by an event of ``iteration``."""
    seen: list[tuple[str, int]] = []
    return {
        "on_event": lambda one: seen.append((one["event"], one["iteration"])),
        "stopped": lambda: "stopped" if (event, iteration) in seen else "",
    }


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd", "lion", "adafactor", "muon"])
def test_a_resumed_run_ends_bit_for_bit_where_an_unbroken_one_does(
    base: Path, tmp_path: Path, optimizer: str
) -> None:
    asked = recipe(optimizer=optimizer)
    trained(base, tmp_path / "whole", asked)
    _, stopped = trained(base, tmp_path / "parts", asked, **stop_after(4))
    assert stopped.progress.iteration == 6
    _, result = trained(base, tmp_path / "parts", asked, resume=True)
    assert result.progress.iteration == 12
    assert result.notes == ("resumed from iteration 6",)
    assert tensors(tmp_path / "parts") == tensors(tmp_path / "whole")


def test_a_validation_is_left_at_once_and_made_by_the_run_that_goes_on(
    base: Path, tmp_path: Path
) -> None:
    _, whole = trained(base, tmp_path / "whole", recipe())
    _, stopped = trained(base, tmp_path / "parts", recipe(), **stop_after(0, "begin"))
    assert (stopped.progress.iteration, stopped.progress.val_loss) == (0, None)
    _, stopped = trained(base, tmp_path / "parts", recipe(), **stop_after(8, "train"))
    assert (stopped.progress.iteration, stopped.progress.validated) == (8, 4)
    _, result = trained(base, tmp_path / "parts", recipe(), resume=True)
    assert result.progress == whole.progress
    assert tensors(tmp_path / "parts" / "best") == tensors(tmp_path / "whole" / "best")
    assert tensors(tmp_path / "parts") == tensors(tmp_path / "whole")


def test_a_stop_is_heard_between_the_batches_of_a_validation(base: Path) -> None:
    heard = iter([False, False, True])
    loss = validation_loss(load(base).model, examples(8), 2, stopped=lambda: next(heard))
    assert loss is None
    assert list(heard) == []


@pytest.mark.parametrize("name", ["optimizer.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_does(
    base: Path, tmp_path: Path, name: str
) -> None:
    run = tmp_path / "run"
    trained(base, run, recipe(8))
    before, newest = checkpoints(run)
    damaged = newest / name
    damaged.write_bytes(damaged.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=f"move {newest} away"):
        trained(base, run, recipe(8), resume=True)
    newest.rename(tmp_path / "away")
    _, result = trained(base, run, recipe(8), resume=True)
    assert result.notes == (f"resumed from iteration {int(before.name)}",)


def test_a_run_that_was_killed_after_its_last_checkpoint_gets_the_adapter_of_that(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from uma.runtime.lora import run as module

    whole = module.save_adapter

    def killed(folder: Path, *content: Any) -> None:
        if checkpoints(tmp_path) and checkpoints(tmp_path)[-1].name == "0000008":
            raise KeyboardInterrupt
        whole(folder, *content)

    monkeypatch.setattr(module, "save_adapter", killed)
    with pytest.raises(KeyboardInterrupt):
        trained(base, tmp_path, recipe(8), validation=())
    assert tensors(tmp_path) == tensors(checkpoints(tmp_path)[0])
    monkeypatch.undo()
    trained(base, tmp_path, recipe(8), validation=(), resume=True)
    assert tensors(tmp_path) == tensors(checkpoints(tmp_path)[-1])


def test_a_resumed_run_trains_the_adapter_and_nothing_else(base: Path, tmp_path: Path) -> None:
    """mlx_lm's ``load_adapters`` leaves the whole base trainable (cases E13, V11)."""
    from mlx_lm.tuner.utils import load_adapters

    trained(base, tmp_path, recipe(4))
    loaded, _ = trained(base, tmp_path, recipe(8), resume=True)
    names = dict(tree_flatten(loaded.model.trainable_parameters())).keys()
    assert names == tensors(tmp_path).keys()
    theirs = load_adapters(load(base).model, str(tmp_path))
    assert len(tree_flatten(theirs.trainable_parameters())) > len(names)


def test_a_layer_without_a_gradient_fails_before_the_validation(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mlx_lm.lora validates first, and dies then on the first step (case E6)."""
    from uma.runtime.lora import train as module

    def no_gradient(*_: Any, **__: Any) -> Any:
        raise ValueError("[Primitive::vjp] Not implemented for Mystery")

    monkeypatch.setattr(module, "loss_and_gradients", no_gradient)
    seen: list[str] = []
    monkeypatch.setattr(module, "validation_loss", lambda *_: seen.append("validated") or 1.0)
    with pytest.raises(ValueError, match="Mystery"):
        trained(base, tmp_path, recipe())
    assert not seen


def test_validation_and_saving_hold_no_more_than_a_step(base: Path, tmp_path: Path) -> None:
    """Validation has the rows of a pass; a checkpoint is of the adapter alone (cases E10, E22)."""
    asked = recipe(8)
    asked = replace(asked, course=replace(asked.course, pass_tokens=64))
    _, result = trained(base, tmp_path, asked, validation=examples(30, 2))
    peaks = result.held.peaks
    assert peaks["validation"] <= max(peaks["forward"], peaks["backward"])
    assert peaks["save"] <= result.held.resting_bytes + 2 * result.held.optimizer_bytes
    whole = replace(asked, course=replace(asked.course, pass_tokens=None, batch_size=8))
    _, more = trained(base, tmp_path / "whole", whole, validation=examples(30, 2))
    assert more.held.peaks["validation"] > peaks["validation"]


def test_what_trains_is_held_once(base: Path, tmp_path: Path) -> None:
    """The first adapter would stay beside the newest, and the plan knows of one."""
    asked = recipe(8, num_layers=-1, rank=256, optimizer="sgd")
    _, result = trained(base, tmp_path, asked, validation=examples(30, 2))
    held = result.held
    assert held.adapter_bytes > 4 << 20
    assert held.peaks["save"] < held.resting_bytes + held.optimizer_bytes + held.adapter_bytes // 2


def test_a_full_disk_is_told_and_the_former_checkpoint_kept(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = recipe()
    trained(base, tmp_path / "whole", asked)
    save = mx.save_safetensors

    def full(path: str, *args: Any) -> None:
        if path.endswith(".0000008.partial/optimizer.safetensors"):
            raise RuntimeError("[write] No space left on device")
        save(path, *args)

    monkeypatch.setattr(mx, "save_safetensors", full)
    with pytest.raises(StorageError, match=r"No space left.*earlier ones are kept"):
        trained(base, tmp_path / "run", asked)
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["0000004"]
    monkeypatch.undo()
    trained(base, tmp_path / "run", asked, resume=True)
    assert tensors(tmp_path / "run") == tensors(tmp_path / "whole")


def test_the_newest_two_checkpoints_are_kept(base: Path, tmp_path: Path) -> None:
    trained(base, tmp_path, recipe())
    assert [path.name for path in checkpoints(tmp_path)] == ["0000008", "0000012"]


@pytest.mark.parametrize("method", ["lora", "dora", "full"])
def test_mlx_lm_loads_the_adapter_and_computes_the_same(
    base: Path, tmp_path: Path, method: str
) -> None:
    import mlx_lm

    loaded, _ = trained(base, tmp_path, recipe(method=method))
    theirs, _ = mlx_lm.load(str(base), adapter_path=str(tmp_path))
    loaded.model.eval()
    tokens = mx.array([[5, 9, 200, 31]])
    plain = load(base).model(tokens)
    assert mx.array_equal(loaded.model(tokens), theirs(tokens))
    assert not mx.allclose(plain, theirs(tokens), atol=1e-3)


def test_the_best_adapter_stays_beside_the_last_and_patience_ends_the_run(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mlx_lm.lora keeps the last adapter alone, however much worse it is."""
    from uma.runtime.lora import train as module

    losses = iter([9.0, 5.0, 4.0, 6.0, 7.0, 3.0])
    monkeypatch.setattr(module, "validation_loss", lambda *_: next(losses))
    asked = recipe(40)
    asked = replace(asked, course=replace(asked.course, patience=2))
    _, part = trained(base, tmp_path, asked, **stop_after(12, "validation"))
    assert (part.ending, part.progress.worse) == ("stopped", 1)
    best = tensors(tmp_path / "best")
    assert best != tensors(tmp_path)
    _, result = trained(base, tmp_path, asked, resume=True)
    assert (result.ending, result.progress.iteration) == ("patience", 16)
    assert (result.progress.best_val_loss, result.progress.best_iteration) == (4.0, 8)
    assert tensors(tmp_path / "best") == best
    assert (tmp_path / "best" / "adapter_config.json").is_file()
    _, again = trained(base, tmp_path, asked, resume=True)
    assert (again.ending, again.progress.iteration) == ("patience", 16)
    longer = replace(asked, course=replace(asked.course, patience=5, iters=20))
    _, after = trained(base, tmp_path, longer, resume=True)
    assert (after.ending, after.progress.best_val_loss) == ("done", 3.0)
    assert tensors(tmp_path / "best") == tensors(tmp_path)


def test_an_adapter_that_is_worse_than_the_untouched_model_is_never_the_best(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from uma.runtime.lora import train as module

    losses = iter([2.0, 4.0, 3.0, 2.5])
    monkeypatch.setattr(module, "validation_loss", lambda *_: next(losses))
    asked = recipe(40)
    asked = replace(asked, course=replace(asked.course, patience=3))
    _, result = trained(base, tmp_path, asked)
    assert result.ending == "patience"
    assert (result.progress.best_val_loss, result.progress.best_iteration) == (2.0, 0)
    assert not (tmp_path / "best").exists()


def test_an_optimizer_that_is_not_finite_ends_the_run(base: Path, tmp_path: Path) -> None:
    """Averages of squares that overflow let nothing move, and no loss shows it."""
    asked = recipe(4, scale=1e25)
    asked = replace(asked, course=replace(asked.course, max_grad_norm=None))
    with pytest.raises(Diverged, match=r"optimizer\.\S+\.v is not finite after iteration 4"):
        trained(base, tmp_path, asked)


def test_a_batch_in_smaller_passes_makes_the_same_update(base: Path, tmp_path: Path) -> None:
    found = []
    for n, tokens in enumerate((None, 64, 1)):
        asked = recipe(4, optimizer="sgd", dropout=0.0)
        course = replace(asked.course, batch_size=6, pass_tokens=tokens, loss_rows=20)
        trained(base, tmp_path / str(n), replace(asked, course=course))
        found.append(mx.load(str(tmp_path / str(n) / WEIGHTS)))
    for other in found[1:]:
        for name, value in found[0].items():
            assert mx.allclose(value, other[name], atol=1e-6, rtol=1e-5)


def test_packed_rows_in_shorter_ones_make_the_same_update_in_less_memory(
    base: Path, tmp_path: Path
) -> None:
    """Every token weighs the same, whichever row it stands in."""
    found, peaks, losses = [], [], []
    for row_tokens in (None, 96, 40):
        asked = recipe(4, optimizer="sgd", dropout=0.0)
        course = replace(asked.course, pack_tokens=192, row_tokens=row_tokens)
        folder = tmp_path / str(row_tokens)
        _, result = trained(base, folder, replace(asked, course=course), validation=())
        found.append(mx.load(str(folder / WEIGHTS)))
        peaks.append(result.held.peaks["backward"])
        losses.append(result.progress.train_loss)
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[2] < 0.8 * peaks[0]
    for other in found[1:]:
        for name, value in found[0].items():
            assert mx.allclose(value, other[name], atol=1e-6, rtol=1e-5)


def test_accumulated_batches_weigh_each_token_alike(base: Path, tmp_path: Path) -> None:
    """Two batches of 2 make the update of one batch of 4; mlx-lm weighs each batch alike."""
    results = []
    for size, steps in ((2, 2), (4, 1)):
        course = Course(iters=steps, batch_size=size, grad_accumulation_steps=steps, seed=0)
        asked = Recipe(Adapter(num_layers=2, rank=2), course, "sgd", 1.0)
        loaded = load(base)
        folder = tmp_path / str(size)
        fine_tune(
            loaded,
            examples(4),
            (),
            asked,
            folder,
            resume=False,
            data=DATA,
            blas="any",
            on_event=lambda _: None,
        )
        results.append(mx.load(str(folder / WEIGHTS)))
    for name, value in results[0].items():
        assert mx.allclose(value, results[1][name], atol=1e-6)


def test_the_gradients_of_a_large_update_survive_float16(base: Path, tmp_path: Path) -> None:
    """Slopes of a hundredth stand for a hundred times the tokens.

    Divided by the tokens before the way back, 17 % of what the update should be was lost.
    """
    found = []
    for dtype in (mx.float32, mx.float16):
        loaded = load(base)
        loaded.model.set_dtype(mx.float16)
        loaded.model.set_dtype(dtype)
        loaded.model.model.norm.weight *= 0.01
        course = Course(iters=6, batch_size=2, grad_accumulation_steps=6, seed=0)
        asked = Recipe(Adapter(num_layers=2, rank=2), course, "sgd", 1.0)
        options = {"resume": False, "data": DATA, "blas": "any", "on_event": lambda _: None}
        fine_tune(loaded, examples(), (), asked, tmp_path / str(dtype), **options)
        weights = mx.load(str(tmp_path / str(dtype) / WEIGHTS))
        found.append({n: np.array(w) for n, w in weights.items() if n.endswith("lora_b")})
    for name, update in found[0].items():
        assert np.linalg.norm(found[1][name] - update) < 0.01 * np.linalg.norm(update)


def test_whole_layers_in_float16_are_refused(base: Path) -> None:
    model = load(base).model
    model.set_dtype(mx.float16)
    with pytest.raises(UnsupportedModel, match="train in float16"):
        put_adapter(model, Adapter(method="full", num_layers=2))


@pytest.mark.parametrize("float32", [True, False])
def test_whole_layers_of_a_quantized_base_are_refused_by_the_plan(
    tmp_path: Path, float32: bool
) -> None:
    """They have no gradient in integers; in float32 mlx_lm would not load them."""
    four = {"bits": 4, "group_size": 32, "mode": "affine"}
    folder = saved_model("full", tmp_path / "model", quantization=four)
    with pytest.raises(UnsupportedModel, match="of a quantized model do not train"):
        adapted(folder, Adapter(method="full", num_layers=2), float32=float32)
    with pytest.raises(UnsupportedModel, match="of a quantized model do not train"):
        put_adapter(load(folder).model, Adapter(method="full", num_layers=2))


def test_resuming_with_other_settings_names_each_that_differs(base: Path, tmp_path: Path) -> None:
    trained(base, tmp_path, recipe())
    with pytest.raises(UsageError, match=r"(?s)rank: was 2, is 4.*scale: was 20.0, is 5.0"):
        trained(base, tmp_path, recipe(rank=4, scale=5.0), resume=True)
    fewer = replace(recipe(), course=replace(recipe().course, val_batches=1))
    with pytest.raises(UsageError, match="val_batches: was 25, is 1"):
        trained(base, tmp_path, fewer, resume=True)
    other = DATA | {"train_data": "y"}
    copy = tmp_path / "another model"
    shutil.copytree(base, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config, indent=3))
    told = f"the base was {base}, is {copy}"
    with pytest.raises(UsageError, match=re.escape(told)):
        trained(copy, tmp_path, recipe(), resume=True)
    with pytest.raises(UsageError, match="train_data: was x, is y"):
        trained(base, tmp_path, recipe(), resume=True, data=other)


def test_a_base_of_which_one_matrix_differs_is_another_one(base: Path, tmp_path: Path) -> None:
    """As published, a file begins with the embedding: the same in many fine-tuned models."""
    weights = {name: np.array(w) for name, w in mx.load(str(base / "model.safetensors")).items()}
    weights["model.embed_tokens.weight"] = np.zeros((1 << 15, 64), np.float32)
    found = []
    for factor in (1, 1, 2):
        weights["model.layers.3.mlp.up_proj.weight"] *= factor
        folder = tmp_path / str(len(found))
        folder.mkdir()
        shutil.copy(base / "config.json", folder)
        save_file(weights, folder / "model.safetensors")
        found.append(fingerprint(folder))
    assert found[0] == found[1] != found[2]


def test_resuming_says_when_the_arithmetic_is_another(base: Path, tmp_path: Path) -> None:
    trained(base, tmp_path, recipe(4))
    _, result = trained(base, tmp_path, recipe(), resume=True, blas="another")
    assert any("not bit for bit" in note and "blas" in note for note in result.notes)


def test_resuming_says_when_the_last_update_was_a_smaller_one(base: Path, tmp_path: Path) -> None:
    trained(base, tmp_path, recipe(5))
    _, result = trained(base, tmp_path, recipe(), resume=True)
    assert any("made of 1 batches instead of 2" in note for note in result.notes)


def test_a_run_is_never_written_over(base: Path, tmp_path: Path) -> None:
    trained(base, tmp_path, recipe(4))
    with pytest.raises(UsageError, match="holds another run"):
        trained(base, tmp_path, recipe(4))
    with pytest.raises(UsageError, match="no checkpoint to resume"):
        trained(base, tmp_path / "empty", recipe(4), resume=True)


def test_an_adapter_of_another_rank_or_other_keys_is_refused(tmp_path: Path) -> None:
    """mlx-lm's own resume takes both in silence."""
    mx.save_safetensors(str(tmp_path / WEIGHTS), {"a.lora_a": mx.zeros((4, 2))})
    wanted = {"a.lora_a": mx.zeros((4, 3)), "a.lora_b": mx.zeros((3, 4))}
    with pytest.raises(CheckpointError, match=r"a.lora_b is missing; a.lora_a is \(4, 2\)"):
        load_adapter(tmp_path / WEIGHTS, wanted)


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_nothing_but_the_adapter_trains(method: Any) -> None:
    model = build_model(CONFIGS["full"])
    found = put_adapter(model, Adapter(method=method, num_layers=1, rank=2))
    leaves = {"lora_a", "lora_b"} | ({"m"} if method == "dora" else set())
    assert {name.rsplit(".", 1)[-1] for name in found} == leaves
    assert {name.split(".")[2] for name in found} == {"3"}
    assert dict(tree_flatten(model.trainable_parameters())).keys() == found.keys()


def test_dora_on_three_bits_is_refused_by_name() -> None:
    """mlx-lm 0.32.2 builds it and fails in the first product of matrices."""
    model = build_model(CONFIGS["full"])
    nn.quantize(model, 32, 3)
    with pytest.raises(UnsupportedModel, match="has 3 bits"):
        put_adapter(model, Adapter(method="dora", num_layers=1))


@pytest.mark.parametrize(
    ("adapter", "text"),
    [
        (Adapter(num_layers=9), "the model has 4"),
        (Adapter(num_layers=0), "the model has 4"),
        (Adapter(num_layers=2, keys=("nothing",)), "no layer is named nothing; give --keys of mlp"),
        (Adapter(num_layers=2, keys=("self_attn.q_proj", "v_proj")), "named v_proj; give .*v_proj"),
    ],
)
def test_an_adapter_that_cannot_be_put_is_refused(adapter: Adapter, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        put_adapter(build_model(CONFIGS["full"]), adapter)


def test_a_gradient_that_is_not_finite_is_named_with_the_lines_of_its_pass(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mlx_lm.lora trains on with NaN in every tensor (cases E7, E8)."""
    from uma.runtime.lora import train as module

    whole, calls = module.loss_and_gradients, []

    def poisoned(*args: Any, **options: Any) -> Any:
        loss, found = whole(*args, **options)
        calls.append(args)
        if len(calls) == 7:  # the first is thrown away
            name = sorted(found)[1]
            found[name] = found[name] * float("inf")
        return loss, found

    monkeypatch.setattr(module, "loss_and_gradients", poisoned)
    asked = recipe()
    with pytest.raises(Diverged, match=r"gradient of \S+lora_\S+ is not finite in iteration 6"):
        trained(base, tmp_path, asked)
    assert [path.name for path in checkpoints(tmp_path)] == ["0000004"]
    assert all(mx.isfinite(value).all() for value in mx.load(str(tmp_path / WEIGHTS)).values())
    assert events(tmp_path)[-1]["how"] == "failed"


def test_an_adapter_that_is_not_finite_is_not_saved(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from uma.runtime.lora import train as module

    whole, calls = module._update, []

    def overflowing(model: nn.Module, optimizer: Any, gradients: Any, norm: Any) -> None:
        calls.append(norm)
        if len(calls) == 4:
            gradients = {name: mx.full(g.shape, 3e38) for name, g in gradients.items()}
            optimizer.learning_rate, norm = 1e30, None
        whole(model, optimizer, gradients, norm)

    monkeypatch.setattr(module, "_update", overflowing)
    with pytest.raises(Diverged, match=r"lora_\w is not finite after iteration 8; it is not saved"):
        trained(base, tmp_path, replace(recipe(optimizer="sgd"), warmup=0), validation=())
    assert [path.name for path in checkpoints(tmp_path)] == ["0000004"]
    assert all(mx.isfinite(value).all() for value in mx.load(str(tmp_path / WEIGHTS)).values())


def test_an_update_that_is_not_finite_is_not_blamed_on_the_next_batch(
    base: Path, tmp_path: Path
) -> None:
    """As Adam's 1e-8 is 0 in float16: 0 / 0 where a gradient is 0."""
    asked = replace(recipe(optimizer="adam"), optimizer_config={"eps": 0.0})
    with pytest.raises(Diverged, match=r"lora_a is not finite after iteration 2"):
        trained(base, tmp_path, asked)


def test_a_loss_that_is_not_finite_never_reaches_the_adapter(base: Path, tmp_path: Path) -> None:
    loaded = load(base)
    loaded.model.model.norm.weight = mx.full((64,), float("nan"))
    with pytest.raises(Diverged, match=r"the loss is not finite in iteration 1 \(lines \d+, \d+"):
        fine_tune(
            loaded,
            examples(),
            (),
            recipe(),
            tmp_path,
            resume=False,
            data=DATA,
            blas="any",
            on_event=lambda _: None,
        )
    factors = dict(tree_flatten(loaded.model.trainable_parameters()))
    assert all(mx.isfinite(value).all() for value in factors.values())
    assert not checkpoints(tmp_path)


def test_a_validation_set_smaller_than_a_batch_is_evaluated(base: Path) -> None:
    """mlx-lm stops: "Dataset must have at least batch_size examples"."""
    model = load(base).model
    rows = examples(3)
    loss = validation_loss(model, rows, batch_size=8)
    flat = []
    for row in rows:
        batch = batch_of([[row]])
        logits = model(mx.array(batch.tokens)).astype(mx.float32)
        each = nn.losses.cross_entropy(logits, mx.array(batch.targets)) * mx.array(batch.weights)
        flat.append(each.sum().item())
    assert loss == pytest.approx(sum(flat) / sum(e.targets for e in rows), rel=1e-5)


def data_folder(folder: Path) -> Path:
    folder.mkdir()
    rows = [{"prompt": f"What is {n}?", "completion": f"The number {n}."} for n in range(8)]
    for name, part in (("train", rows), ("valid", rows[:2])):
        text = "".join(json.dumps(row) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(text)
    return folder


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def command(base: Path, tmp_path: Path, *more: str) -> list[str]:
    return [
        *("lora", "train", str(base), "--data", str(tmp_path / "data"), "--json"),
        *("--adapter-path", str(tmp_path / "run"), "--num-layers", "2", "--batch-size", "2"),
        *("--learning-rate", "0.005", "--mask-prompt", "--allow-concurrent", *more),
    ]


def test_the_command_trains_reports_and_resumes(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UMA_STATE_DIR", str(tmp_path / "state"))
    data_folder(tmp_path / "data")
    assert main(command(base, tmp_path, "--iters", "8", "--save-every", "4")) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["iters"] == 8
    assert first["trainable_parameters"] == sum(
        value.size for value in mx.load(str(tmp_path / "run" / WEIGHTS)).values()
    )
    ledger = first["ledger"]
    sizes = {(t["name"], t["phase"]): t for t in ledger["terms"]}
    for name in ("weights", "adapters", "optimizer_states"):
        assert sizes[name, "always"]["measured_bytes"] == sizes[name, "always"]["predicted_bytes"]
    for name, phase in (("activations", "backward"), ("other", "optimizer")):
        found = sizes[name, phase]
        assert 0 < found["measured_bytes"] < found["predicted_bytes"] + (256 << 10)
    assert ledger["verdict"] == "fits"
    assert ledger["measured_peak_bytes"] > ledger["resting_bytes"]
    assert ledger["pool_bytes"] <= 32 << 20  # MLX's pool is bounded by default (cases E2, E18)
    [record] = [read_json(path) for path in (tmp_path / "state" / "records").iterdir()]
    assert record["command"] == "lora train"
    assert record["settings"]["optimizer"] == "adam"
    assert record["settings"]["micro_batch"] == 2
    assert record["ledger"]["measured_peak_bytes"] == ledger["measured_peak_bytes"]
    assert str(tmp_path) not in json.dumps(record)
    log = (tmp_path / "run" / "log.jsonl").read_bytes()
    for less in (
        ["--iters", "8"],
        ["--iters", "3"],
        ["--epochs", "1"],
        ["--iters", "8", "--dry-run"],
    ):
        assert main(command(base, tmp_path, *less, "--resume")) == 0
        nothing = json.loads(capsys.readouterr().out)
        assert (nothing["ending"], nothing["iters"]) == ("done", 8)
        assert nothing["val_loss"] == first["val_loss"]
        assert "nothing is left to do: 8 iterations are done" in nothing["notes"][0]
    assert (tmp_path / "run" / "log.jsonl").read_bytes() == log
    template = base / "chat_template.jinja"
    text = template.read_text()
    template.write_text("{{ '<s>' }}" + text)
    assert main(command(base, tmp_path, "--epochs", "6", "--resume")) == 2
    assert "tokens of train.jsonl: was " in capsys.readouterr().err
    template.write_text(text)
    assert main(command(base, tmp_path, "--epochs", "6", "--resume")) == 0
    second = json.loads(capsys.readouterr().out)
    assert second["iters"] == 24
    assert second["val_loss"] < first["val_loss"]
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [e["iteration"] for e in log if e["event"] == "begin"] == [0, 8]
    with (tmp_path / "data" / "train.jsonl").open("a") as file:
        file.write('{"text": "one row more"}\n')
    kept = tensors(tmp_path / "run")
    assert main(command(base, tmp_path, "--iters", "30", "--resume", "--rank", "4")) == 2
    told = capsys.readouterr().err
    assert "rank: was 8, is 4" in told
    assert "train.jsonl: was " in told
    assert tensors(tmp_path / "run") == kept


def test_a_last_validation_that_was_left_is_made_by_the_command_that_goes_on(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data_folder(tmp_path / "data")
    asked = command(base, tmp_path, "--iters", "4", "--steps-per-eval", "50")
    assert main(asked) == 0
    run, first = tmp_path / "run", json.loads(capsys.readouterr().out)
    state = run / "checkpoints" / "0000004" / "state.json"
    left = read_json(state)
    left["progress"] |= {"val_loss": 9.0, "best_val_loss": 9.0, "best_iteration": 0, "validated": 0}
    state.write_text(json.dumps(left))
    shutil.rmtree(run / "best")
    assert main([*asked, "--resume"]) == 0
    assert json.loads(capsys.readouterr().out)["val_loss"] == first["val_loss"]
    assert tensors(run / "best") == tensors(run)
    assert main([*asked, "--resume"]) == 0
    assert "nothing is left to do" in json.loads(capsys.readouterr().out)["notes"][0]


@pytest.mark.parametrize("inside", ["best", "checkpoints"])
def test_a_folder_inside_the_run_that_cannot_be_written_is_found_before_the_training(
    base: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], inside: str
) -> None:
    data, run = tmp_path / "data", tmp_path / "run"
    data.mkdir()
    run.mkdir()
    (data / "train.jsonl").write_text('{"text": "the quick brown fox"}\n' * 4)
    (run / inside).symlink_to(tmp_path / "gone")
    command = ["lora", "train", str(base), "--data", str(data), "--adapter-path", str(run)]
    assert main([*command, "--iters", "2", "--allow-concurrent"]) == 1
    assert f"{run / inside} cannot be written" in capfd.readouterr().err
    assert not any(event["event"] == "begin" for event in events(run))


def test_the_peak_of_a_run_without_an_update_is_not_held_against_its_plan(
    base: Path, tmp_path: Path
) -> None:
    plan = plan_fine_tuning(case(base, rows((40,), 2)), Cut(), smaller=False)
    for folder, end in ((tmp_path / "stopped", stop_after(0, "validation")), (tmp_path, {})):
        loaded, result = trained(base, folder, recipe(4), **end)
        peak = result.held.peak_bytes if result.progress.iteration else None
        assert _measured(plan, loaded, result).measured_peak_bytes == peak


def test_the_check_names_the_first_bad_line_and_fails(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = data_folder(tmp_path / "data")
    arguments = ["lora", "check", str(base), "--data", str(data), "--mask-prompt"]
    assert main(arguments) == 0
    assert "2 rows are also trained on" in capsys.readouterr().out
    with (data / "train.jsonl").open("a") as file:
        file.write('{"txt": "a"}\n')
    assert main(arguments) == 1
    assert "train.jsonl:9:1: no known format" in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["splits"]["train"]["problems"][0]["line"] == 9
    assert main(command(base, tmp_path)) == 1
    assert "train.jsonl:9:1" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
