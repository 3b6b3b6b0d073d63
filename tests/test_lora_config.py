"""``uma lora train -c FILE``: mlx_lm.lora's own YAML, defaults beside its defaults, and reports."""

import json
import struct
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from mlx_lm.lora import CONFIG_DEFAULTS
from models import saved_model

from uma.cli import main
from uma.cli.lora import train as lora_train
from uma.cli.lora.asked import Asked
from uma.cli.lora.options import Optimizer
from uma.cli.lora.plan import DEFAULT_LAYERS
from uma.errors import RuntimeUnavailable
from uma.runtime.lora.event_file import EventFile, event, record
from uma.runtime.lora.optimizer import Name
from uma.runtime.lora.trackers import reporting, trackers

DOCS = Path(__file__).parents[1] / "docs" / "lora.md"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A function from arguments to what ``uma lora train`` would be asked."""
    found: list[Asked] = []
    monkeypatch.setattr(lora_train, "_dispatch", lambda one: found.append(one) or 0)

    def parse(*arguments: str) -> Asked:
        assert main(["lora", "train", "--data", str(tmp_path), *arguments]) == 0
        return found[-1]

    return parse


def written(folder: Path, content: Any) -> str:
    path = folder / "config.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return str(path)


def test_mlx_lm_s_defaults_are_accepted_and_ours_but_for_what_the_document_lists(
    asked: Any, tmp_path: Path
) -> None:
    """Model and data set are named on the command line; the rest must be the same."""
    theirs = CONFIG_DEFAULTS | {"train": True}
    ours, given = asked(), asked("-c", written(tmp_path, theirs))
    differing = {
        name
        for name in Asked.__dataclass_fields__
        if getattr(ours, name) != getattr(given, name) and name not in ("model", "data")
    }
    # Theirs names every optimizer, with nothing set; our 16 layers are fewer in a smaller model.
    assert differing == {"optimizer_config", "num_layers"}
    assert (ours.num_layers, given.num_layers, DEFAULT_LAYERS) == (None, 16, 16)
    assert given.model == CONFIG_DEFAULTS["model"]
    options = set(Asked.__dataclass_fields__) | {"train", "test", "config", "lora_parameters"}
    document = DOCS.read_text(encoding="utf-8")
    for key in CONFIG_DEFAULTS:
        assert key in options or f"`{key}`" in document, key


DIFFERENCES = {
    "gradient checkpointing": "test_lora_step.py::"
    "test_a_long_row_costs_the_step_a_fraction_of_the_memory",
    "accumulated batches": "test_lora_run.py::test_accumulated_batches_weigh_each_token_alike",
    "last, smaller batch of an epoch": "test_dataset.py::"
    "test_batches_hold_every_example_once_and_like_lengths_together",
    "validation set smaller than a batch": "test_lora_eval.py::"
    "test_the_loss_does_not_depend_on_the_batch",
    "`--mask-prompt`": "test_cases_lora.py::test_every_answer_of_a_chat_is_supervised",
    "padding after the end": "test_cases_lora.py::test_the_padding_after_a_row_is_not_predicted",
    "order of batches": "test_cases_lora.py::test_rows_of_like_length_share_a_batch",
    "rows of several formats in a file": "test_cases_lora.py::test_rows_may_have_different_formats",
    "`--mask-prompt` with plain text": "test_dataset.py::test_plain_text_has_no_prompt_to_mask",
    "unknown keys of a YAML file": "test_lora_config.py::test_what_is_wrong_in_the_file_is_named",
    "more layers than there are": "test_lora_run.py::test_an_adapter_that_cannot_be_put_is_refused",
    "Adafactor's step": "test_lora_optimizers.py::test_adafactor_takes_the_learning_rate",
}


def test_every_difference_that_the_document_lists_is_kept_by_a_test() -> None:
    text = DOCS.read_text(encoding="utf-8").split("## What differs from `mlx_lm.lora`")[1]
    rows = [line.split(" | ")[0].strip("| ") for line in text.splitlines() if line[:2] == "| "]
    assert set(rows[1:]) == set(DIFFERENCES)
    for row, place in DIFFERENCES.items():
        file, _, name = place.partition("::")
        assert f"def {name}(" in (Path(__file__).parent / file).read_text(encoding="utf-8"), row


def test_flags_win_over_the_file_and_the_file_over_variables(
    asked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UMA_ITERS", "5")
    monkeypatch.setenv("UMA_SEED", "6")
    file = written(tmp_path, "iters: 20\nbatch_size: 2\nlearning_rate: 1e-4\nmask_prompt: true\n")
    found = asked("--batch-size", "8", "-c", file)
    assert (found.iters, found.batch_size, found.seed) == (20, 8, 6)
    assert found.learning_rate == 1e-4
    assert found.mask_prompt is True


def test_nested_keys_reach_their_options(asked: Any, tmp_path: Path) -> None:
    file = written(
        tmp_path,
        {
            "lora_parameters": {"keys": ["self_attn.q_proj"], "rank": 4, "scale": 2.0},
            "lr_schedule": {"name": "cosine_decay", "warmup": 9, "arguments": [1e-5, 100]},
            "optimizer": "adamw",
            "optimizer_config": {"adamw": {"weight_decay": 0.5}, "sgd": {"momentum": 0.9}},
            "epochs": 3,
            "resume_adapter_file": None,
            "save-every": 7,
            "grad_checkpoint": True,
        },
    )
    found = asked("-c", file)
    assert (found.rank, found.scale, found.keys) == (4, 2.0, ["self_attn.q_proj"])
    assert (found.epochs, found.save_every) == (3, 7)
    assert json.loads(found.lr_schedule)["warmup"] == 9
    from uma.cli.lora.config import settings_of

    assert settings_of("adamw", found.optimizer_config) == {"weight_decay": 0.5}
    assert settings_of("adam", found.optimizer_config) is None
    assert settings_of("adam", '{"eps": 1e-6}') == {"eps": 1e-6}
    single = written(tmp_path, {"lora_parameters": {"keys": "self_attn.q_proj"}})
    assert asked("-c", single).keys == ["self_attn.q_proj"]
    assert get_args(Name) == get_args(Optimizer)
    assert asked("-c", written(tmp_path, "iters: 1e3\nlearning_rate: 1e0")).iters == 1000


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("batchsize: 4", "unknown key 'batchsize'; did you mean batch_size?"),
        ("lora_layers: 4", "unknown key 'lora_layers'; did you mean num_layers?"),
        ("colour: red", "unknown key 'colour'; known: adapter_path, allow_concurrent"),
        ("iters: 1.5e0", "iters: '1.5' is not a valid int"),
        ("iters: many", "iters: 'many' is not a valid int"),
        ("iters: 0", "iters: 0 is not in the range"),
        ("iters: true", "iters: True is not right"),
        ("mask_prompt: 3", "mask_prompt: 3 is not true or false"),
        ("fine_tune_type: qlora", "fine_tune_type: 'qlora' is not one of"),
        ("lora_parameters: {rank: 8, alpha: 16}", "which is alpha / rank: 16 / 8"),
        ("lora_parameters: {alpha: 16, scale: 2}", "which is alpha / rank: 16 / 8"),
        ("lora_parameters: {ranks: 8}", "has no 'ranks'; it has rank, scale, dropout, keys"),
        ("lora_parameters: 8", "lora_parameters is 8 instead of keys"),
        ("train: false", "uma lora eval"),
        ("resume_adapter_file: a", "continue a run with --resume"),
        ("trust_remote_code: true", "no model's own code is run"),
        ("prompt_feature: question", "give the rows of the data set the key 'prompt'"),
        ("lr_schedule: {name: cosine}", "unknown schedule 'cosine'"),
        ("optimizer_config: {betas_: 1}", "adam has no setting 'betas_'"),
        ("optimizer: paged-adamw", "optimizer: 'paged-adamw' is not one of 'adam', 'adamw'"),
        ("num_layers: 0", "--num-layers 0 leaves nothing; give 1 or more, or -1 for all"),
        ("val_batches: 0", "--val-batches 0 leaves nothing"),
        ("data: [a]", "data: ['a'] instead of one value"),
        ("[1, 2]", "holds no keys"),
        ("a: [", "is not YAML"),
    ],
)
def test_what_is_wrong_in_the_file_is_named(
    asked: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, text: str
) -> None:
    """F5, E8: mlx_lm.lora 0.32.2 takes any key, and passes over those that it does not know."""
    command = ["lora", "train", "--data", str(tmp_path), "-c", written(tmp_path, content)]
    assert main(command) == 2
    assert text in capsys.readouterr().err


def test_a_missing_file_and_wrong_json_are_named(
    asked: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, text in (
        (["-c", str(tmp_path / "none.yaml")], "cannot be read: No such file"),
        (["--lr-schedule", "cosine"], "--lr-schedule is not JSON"),
        (["--optimizer-config", "[1]"], "--optimizer-config must be a JSON object"),
        (["--report-to", "mlflow"], "'mlflow' is not one of wandb, swanlab, tensorboard, jsonl"),
    ):
        assert main(["lora", "train", "--data", str(tmp_path), *arguments]) == 2
        assert text in capsys.readouterr().err


def test_a_tracker_that_is_not_installed_is_told_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from importlib import util

    monkeypatch.setattr("uma.runtime.lora.trackers.find_spec", lambda name: None)
    assert util.find_spec("json")
    with pytest.raises(RuntimeUnavailable, match="pip install swanlab"):
        trackers("tensorboard, SwanLab")
    assert trackers("tensorboard,jsonl") == ("tensorboard", "jsonl")
    assert trackers(None) == ()


def test_event_files_are_those_of_tensorboard() -> None:
    """Bytes that tensorboard 2.21's own ``Event`` and ``RecordWriter`` gave."""
    wanted = (
        "36000000000000004f578cef0900001040fc54d94110ac022a280a110a0a747261696e5f6c6f7373150000c03f"
        "0a130a0c746f6b656e735f7065725f731500104b440e98db67"
    )
    message = event(1700000000.25, 300, {"train_loss": 1.5, "tokens_per_s": 812.25})
    assert record(message).hex() == wanted


def test_an_event_file_holds_its_version_and_every_record(tmp_path: Path) -> None:
    file = EventFile(tmp_path, 1700000000.0, 7)
    file.write(1700000001.0, 10, {"train_loss": 1.25})
    file.close()
    (path,) = tmp_path.iterdir()
    data, messages = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        messages.append(data[12 : 12 + length])
        data = data[16 + length :]
    assert b"brain.Event:2" in messages[0]
    assert messages[1] == event(1700000001.0, 10, {"train_loss": 1.25})


STAND_IN = """
import json, sys
calls = []
def init(**about): calls.append(("init", about)); print("a banner")
def log(numbers, step):
    if step == 30: raise OSError("no network")
    calls.append(("log", numbers, step))
def finish(): calls.append(("finish",))
"""


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_losses_go_to_the_tracker_and_its_failure_ends_nothing(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With a module of the same three functions; the real ones are not dependencies of ours."""
    (tmp_path / f"{name}.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    told: list[str] = []
    run = tmp_path / "run"
    with reporting(trackers(name), run, "mine", {"iters": 5}, told.append) as report:
        report({"event": "begin", "settings": {}})
        report({"event": "train", "iteration": 10, "train_loss": 1.5, "ok": True})
        report({"event": "validation", "iteration": 10, "val_loss": 2, "best_iteration": 10})
        report({"event": "train", "iteration": 30, "train_loss": 1.0})
        report({"event": "train", "iteration": 40, "train_loss": 1.0})
    calls = sys.modules[name].calls
    assert calls[0][1]["project"] == "mine"
    assert calls[0][1]["config"] == {"iters": 5}
    assert calls[1:] == [
        ("log", {"train_loss": 1.5}, 10),
        ("log", {"val_loss": 2.0}, 10),
        ("finish",),
    ]
    assert told == [f"{name} takes no more reports: no network"]
    assert capsys.readouterr().out == ""
    monkeypatch.delitem(sys.modules, name)


def test_a_run_from_a_file_reports_to_tensorboard_and_resumes_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UMA_STATE_DIR", str(tmp_path / "state"))
    base, run = saved_model("full", tmp_path / "base"), tmp_path / "run"
    (tmp_path / "data").mkdir()
    rows = [json.dumps({"prompt": f"{n}?", "completion": f"The number {n}."}) for n in range(8)]
    for name in ("train", "valid"):
        (tmp_path / "data" / f"{name}.jsonl").write_text("\n".join(rows))
    asked = {
        "model": str(base),
        "data": str(tmp_path / "data"),
        "adapter_path": str(run),
        "fine_tune_type": "full",
        "num_layers": 1,
        "iters": 4,
        "steps_per_report": 2,
        "optimizer": "adamw8bit",
        "optimizer_config": {"adamw8bit": {"weight_decay": 0.1}},
        "lr_schedule": {"name": "cosine_decay", "arguments": [1e-3, 8], "warmup": 2},
        "report_to": "tensorboard",
    }
    capsys.readouterr()
    command = ["lora", "train", "--json", "--allow-concurrent", "-c"]
    assert main([*command, written(tmp_path, asked)]) == 0
    found = json.loads(capsys.readouterr().out)
    terms = {(t["name"], t["phase"]): t for t in found["ledger"]["terms"]}
    states = terms["optimizer_states", "always"]
    assert states["measured_bytes"] == states["predicted_bytes"]
    (file,) = run.glob("events.out.tfevents.*")
    assert file.read_bytes().count(b"train_loss") == 2
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    rates = [event["learning_rate"] for event in log if event["event"] == "train"]
    assert rates == pytest.approx([5e-4, 1e-3], rel=0.1)
    other = asked | {"iters": 6, "optimizer_config": {"adamw8bit": {"weight_decay": 0.2}}}
    assert main([*command, written(tmp_path, other), "--resume"]) == 2
    assert "optimizer_config: was {'weight_decay': 0.1}" in capsys.readouterr().err
