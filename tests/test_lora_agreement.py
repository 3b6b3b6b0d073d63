"""For every option the plan of ``--dry-run`` is the one that training follows, or both refuse."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from models import saved_model

from uma.cli import main
from uma.cli.lora import train as lora_train
from uma.cli.lora.asked import Asked
from uma.runtime.lora.supervise import PARENT

SCHEDULE = '{"name": "cosine_decay", "arguments": [1e-3, 10], "warmup": 2}'
ACCEPTED = [
    ("--fine-tune-type", "dora", "--num-layers", "-1", "--rank", "3", "--optimizer", "lion"),
    (
        "--fine-tune-type",
        "full",
        "--num-layers",
        "1",
        "--optimizer",
        "adafactor",
        "--batch-size",
        "3",
    ),
    ("--keys", "self_attn.q_proj", "--keys", "mlp.up_proj", "--scale", "2", "--dropout", "0.5"),
    ("--keys", "self_attn.o_proj", "--optimizer", "muon", "--epochs", "1"),
    ("--batch-size", "1", "--grad-accumulation-steps", "2", "--max-seq-length", "20"),
    ("--max-seq-length", "20", "--overlong", "split", "--mask-prompt", "--optimizer", "adamw"),
    ("--max-seq-length", "70", "--overlong", "drop", "--optimizer", "adamw8bit"),
    ("--packing", "--max-seq-length", "128", "--max-grad-norm", "1", "--seed", "5"),
    ("--packing", "--max-seq-length", "256", "--budget", "3500KiB"),
    ("--optimizer", "sgd", "--optimizer-config", '{"momentum": 0.9}', "--warmup", "3", "--cosine"),
    ("--lr-schedule", SCHEDULE, "--budget", "auto", "--reserve", "1GiB"),
    ("--budget", "3500KiB"),
    ("--micro-batch", "1", "--dequantize", "never"),
    ("--no-wire", "--force", "--budget", "3MiB", "--learning-rate", "0"),
]
REFUSED = [
    ("--keys", "q_proj"),
    ("--keys", "self_attn.*"),
    ("--keys", "self_attn"),
    ("--keys", "input_layernorm"),
    ("--keys", "self_attn.q_proj", "--keys", "nothing"),
    ("--num-layers", "9"),
    ("--budget", "1MiB"),
    ("--keys", "lm_head", "--budget", "64MiB"),
    ("--max-seq-length", "2", "--overlong", "drop"),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model("full", tmp_path_factory.mktemp("base") / "model")


@pytest.fixture
def uma(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    """A function from options to exit code, document and errors: planned, or trained in here."""
    data = tmp_path / "data"
    data.mkdir()
    rows = [{"prompt": f"What is {n}?", "completion": "Yes. " * n} for n in range(1, 12)]
    for name, part in (("train", rows[3:]), ("valid", rows[:3])):
        (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    monkeypatch.setenv("UMA_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv(PARENT, str(os.getppid()))

    def run(*options: str) -> tuple[int, dict[str, Any], str]:
        command = ["lora", "train", str(base), "--data", str(data), "--json", *options]
        code = main([*command, "--adapter-path", str(tmp_path / "run"), "--allow-concurrent"])
        found = capsys.readouterr()
        return code, json.loads(found.out) if found.out else {}, found.err.splitlines()[-1:]

    def here(asked: Asked) -> int:
        from uma.cli.lora.plan import print_plan
        from uma.cli.lora.work import work

        return print_plan(asked) if asked.dry_run else work(asked, os.getppid())

    monkeypatch.setattr(lora_train, "_dispatch", here)
    return run


def terms(document: dict[str, Any]) -> list[Any]:
    keys = ("name", "phase", "predicted_bytes", "basis")
    return [[term[key] for key in keys] for term in document["ledger"]["terms"]]


@pytest.mark.parametrize("options", ACCEPTED, ids=" ".join)
def test_training_follows_its_plan(uma: Any, options: tuple[str, ...]) -> None:
    length = () if "--epochs" in options else ("--iters", "2")
    given = ("--num-layers", "2") if "--num-layers" not in options else ()
    code, plan, _ = uma(*given, *length, *options, "--dry-run")
    assert code == 0
    code, done, _ = uma(*given, *length, *options)
    assert code == 0
    assert terms(plan) == terms(done)
    assert plan["batches"] == done["batches"]
    assert plan["ledger"]["verdict"] == done["ledger"]["verdict"]
    measured = {t["name"]: t for t in done["ledger"]["terms"] if t["phase"] == "always"}
    for name in ("weights", "adapters", "optimizer_states"):
        if name in measured:
            assert measured[name]["measured_bytes"] == measured[name]["predicted_bytes"], name


def test_a_model_of_few_layers_trains_them_all_where_no_number_is_asked_for(uma: Any) -> None:
    code, done, _ = uma("--iters", "2")
    assert (code, done["settings"]["num_layers"]) == (0, 4)


@pytest.mark.parametrize("options", REFUSED, ids=" ".join)
def test_what_training_refuses_its_plan_refuses_too(uma: Any, options: tuple[str, ...]) -> None:
    """Before the weights are read, which for training may take minutes."""
    code, _, told = uma("--iters", "2", *options, "--dry-run")
    assert code in (1, 2, 3)
    assert uma("--iters", "2", *options)[::2] == (code, told)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--keys", "lm_head"), "and on nothing else"),
        (("--keys", "self_attn.q_proj", "--keys", "model.embed_tokens"), "and on nothing else"),
        (("--keys", "model.layers.3.mlp.up_proj"), "not the same on all trained layers"),
        (("--optimizer", "adafactor", "--optimizer-config", '{"beta_1": 0.9}'), "beta_1 keeps"),
    ],
)
def test_what_no_term_counts_is_trained_and_its_memory_not_claimed(
    uma: Any, options: tuple[str, ...], why: str
) -> None:
    options = ("--iters", "2", "--num-layers", "2", *options)
    code, plan, _ = uma(*options, "--dry-run")
    assert (code, plan["ledger"]["verdict"]) == (0, "unknown")
    assert why in plan["notes"][0]
    code, done, _ = uma(*options)
    assert (code, done["iters"], done["ledger"]["verdict"]) == (0, 2, "unknown")
