"""A fine-tuning run: what it writes, what mlx_lm makes of it, and what it survives."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from models import CONFIGS, VOCAB_SIZE, build_model, saved_model

from uma.cli import main
from uma.dataset.examples import Example
from uma.errors import CheckpointError, StorageError, UnsupportedModel, UsageError
from uma.runtime.load import LoadedModel, load
from uma.runtime.lora.adapter import WEIGHTS, Adapter, load_adapter, put_adapter
from uma.runtime.lora.checkpoint import checkpoints
from uma.runtime.lora.run import Recipe, fine_tune
from uma.runtime.lora.train import Course, Diverged, batch_of, validation_loss

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
    result = fine_tune(loaded, examples(), examples(5, 1), asked, folder, **defaults | options)
    return loaded, result


def tensors(folder: Path) -> dict[str, list[Any]]:
    return {name: value.tolist() for name, value in mx.load(str(folder / WEIGHTS)).items()}


def stop_after(iteration: int) -> dict[str, Any]:
    """Options of a run that ends with the update after the report of ``iteration``."""
    seen: list[int] = []
    return {
        "on_event": lambda event: seen.append(event["iteration"]),
        "stopped": lambda: bool(seen) and max(seen) >= iteration,
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


CHILD = """
import os, sys
from pathlib import Path
import test_lora_run as t
from uma.runtime.lora import checkpoint, run, train
base, folder, point, count, resume = sys.argv[1:]
left = int(count)

def dies(module, name, before):
    whole = getattr(module, name)
    def call(*args, **kwargs):
        global left
        left -= 1
        if left:
            return whole(*args, **kwargs)
        if before == "half":
            Path(args[0]).write_bytes(b"x" * 100)
        elif before == "after":
            whole(*args, **kwargs)
        os.kill(os.getpid(), 9)
    setattr(module, name, call)

if point != "none":
    dies(*{
        "weights": (checkpoint, "_write", "half"),
        "optimizer": (checkpoint, "_write", "after"),
        "rename": (checkpoint.os, "replace", "no"),
        "renamed": (checkpoint.os, "replace", "after"),
        "adapter": (run, "save_adapter", "no"),
        "step": (train, "_update", "no"),
        "updated": (train, "_update", "after"),
        "validation": (train, "validation_loss", "no"),
    }[point])
t.trained(Path(base), Path(folder), t.recipe(), resume=resume == "True")
"""


def child(base: Path, folder: Path, point: str, count: int, resume: bool) -> int:
    here = str(Path(__file__).parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([here, *filter(None, sys.path)])}
    command = [sys.executable, "-c", CHILD, str(base), str(folder), point, str(count), str(resume)]
    return subprocess.run(command, env=environment, check=False).returncode


@pytest.mark.parametrize(
    ("point", "count"),
    [("weights", 3), ("optimizer", 3), ("rename", 4), ("renamed", 4), ("validation", 3)],
)
def test_a_run_that_is_killed_loses_nothing_that_was_saved(
    base: Path, tmp_path: Path, point: str, count: int
) -> None:
    asked = recipe()
    trained(base, tmp_path / "whole", asked)
    assert child(base, tmp_path / "run", point, count, False) == -9
    assert checkpoints(tmp_path / "run")
    trained(base, tmp_path / "run", asked, resume=True)
    assert tensors(tmp_path / "run") == tensors(tmp_path / "whole")


def test_a_full_disk_is_told_and_the_former_checkpoint_kept(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = recipe()
    trained(base, tmp_path / "whole", asked)
    save, calls = mx.save_safetensors, []

    def full(path: str, *args: Any) -> None:
        calls.append(path)
        if len(calls) == 5:  # the optimizer of the second checkpoint
            raise RuntimeError("[write] No space left on device")
        save(path, *args)

    monkeypatch.setattr(mx, "save_safetensors", full)
    with pytest.raises(StorageError, match=r"No space left.*earlier ones are kept"):
        trained(base, tmp_path / "run", asked)
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["0000004"]
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


def test_resuming_with_other_settings_names_each_that_differs(base: Path, tmp_path: Path) -> None:
    trained(base, tmp_path, recipe())
    with pytest.raises(UsageError, match=r"(?s)rank: was 2, is 4.*scale: was 20.0, is 5.0"):
        trained(base, tmp_path, recipe(rank=4, scale=5.0), resume=True)
    other = DATA | {"train_data": "y"}
    with pytest.raises(UsageError, match="train_data: was x, is y"):
        trained(base, tmp_path, recipe(), resume=True, data=other)


def test_resuming_says_when_the_arithmetic_is_another(base: Path, tmp_path: Path) -> None:
    trained(base, tmp_path, recipe(4))
    _, result = trained(base, tmp_path, recipe(), resume=True, blas="another")
    assert any("not bit for bit" in note and "blas" in note for note in result.notes)


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
        (Adapter(num_layers=2, keys=("nothing",)), "no layer is named nothing"),
    ],
)
def test_an_adapter_that_cannot_be_put_is_refused(adapter: Adapter, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        put_adapter(build_model(CONFIGS["full"]), adapter)


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
        batch = batch_of([[row]], 1.0)
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


def command(base: Path, tmp_path: Path, *more: str) -> list[str]:
    return [
        *("lora", "train", str(base), "--data", str(tmp_path / "data"), "--json"),
        *("--adapter-path", str(tmp_path / "run"), "--num-layers", "2", "--batch-size", "2"),
        *("--learning-rate", "0.005", "--mask-prompt", "--allow-concurrent", *more),
    ]


def test_the_command_trains_reports_and_resumes(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data_folder(tmp_path / "data")
    assert main(command(base, tmp_path, "--iters", "8", "--save-every", "4")) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["iters"] == 8
    assert first["trainable_parameters"] == sum(
        value.size for value in mx.load(str(tmp_path / "run" / WEIGHTS)).values()
    )
    assert main(command(base, tmp_path, "--epochs", "6", "--resume")) == 0
    second = json.loads(capsys.readouterr().out)
    assert second["iters"] == 24
    assert second["val_loss"] < first["val_loss"]
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [e["iteration"] for e in log if e["event"] == "begin"] == [0, 8]
    assert main(command(base, tmp_path, "--iters", "30", "--resume", "--rank", "4")) == 2
    assert "rank: was 8, is 4" in capsys.readouterr().err


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
