"""Data of ``uma lora``: data sets of the hub, and ``uma lora check`` on what people bring."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from fakehub import serving
from models import saved_model

from uma.cli import main
from uma.dataset.hub import HubData, hub_data, hub_folder
from uma.errors import DataError, HubError, RuntimeUnavailable, UsageError


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    (folder / "data").mkdir(parents=True)
    (folder / "README.md").write_text("rows")
    (folder / "data" / "train-00000-of-00002.jsonl").write_text(lines({"text": "a"}, {"text": "b"}))
    (folder / "data" / "train-00001-of-00002.jsonl").write_text(lines({"text": "c"}))
    (folder / "data" / "validation.jsonl").write_text(lines({"text": "d"}))
    return folder


@pytest.fixture
def hub(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    with serving(org__rows=repository) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def texts(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def test_a_data_set_of_the_hub_becomes_a_folder(hub: Any, tmp_path: Path) -> None:
    folder = hub_folder(HubData("org/rows"), tmp_path / "cache")
    assert sorted(p.name for p in folder.iterdir()) == ["train.jsonl", "valid.jsonl"]
    assert texts(folder / "train.jsonl") == ["a", "b", "c"]
    assert texts(folder / "valid.jsonl") == ["d"]
    assert not any("README" in line for line in hub.requests)
    sent = hub.bytes_sent
    assert hub_folder(HubData("org/rows"), tmp_path / "cache") == folder
    assert hub.bytes_sent - sent < 2000  # its list of files alone


def test_it_is_used_again_without_the_network(
    hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = hub_folder(HubData("org/rows"), tmp_path / "cache")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert hub_folder(HubData("org/rows"), tmp_path / "cache") == folder
    with pytest.raises(HubError, match="HF_HUB_OFFLINE"):
        hub_folder(HubData("org/other"), tmp_path / "cache")


def test_keys_and_splits_are_those_of_mlx_lm_s_hf_dataset(
    hub: Any, repository: Path, tmp_path: Path
) -> None:
    rows = [{"question": f"q{n}", "answer": f"a{n}", "id": n} for n in range(12)]
    (repository / "train.jsonl").write_text(lines(*rows))
    for path in (repository / "data").iterdir():
        path.unlink()
    asked = hub_data(
        '{"path": "org/rows", "prompt_feature": "question", "completion_feature": "answer"}'
    )
    assert asked is not None
    folder = hub_folder(asked, tmp_path / "cache")
    found = {p.stem: [json.loads(x) for x in p.read_text().splitlines()] for p in folder.iterdir()}
    assert found["train"][0] == {"prompt": "q0", "completion": "a0"}
    # 80 % of 12 is 9.6, and a tenth 1.2: ``datasets`` 5.2 gives rows 0 to 9 and row 11
    assert [row["prompt"] for row in found["train"]] == [f"q{n}" for n in range(10)]
    assert [row["prompt"] for row in found["valid"]] == ["q11"]
    other = HubData("org/rows", {"train": "train[2:4]", "test": "train[-3:]"})
    folder = hub_folder(other, tmp_path / "cache")
    found = {p.stem: [json.loads(x) for x in p.read_text().splitlines()] for p in folder.iterdir()}
    ids = {name: [row["id"] for row in rows] for name, rows in found.items()}
    assert ids == {"train": [2, 3], "test": [9, 10, 11]}


def test_what_the_hub_lacks_is_told(hub: Any, repository: Path, tmp_path: Path) -> None:
    with pytest.raises(HubError, match="has no data set org/none"):
        hub_folder(HubData("org/none"), tmp_path / "cache")
    with pytest.raises(DataError, match=r"has no split test \(it has train, valid\)"):
        hub_folder(HubData("org/rows", {"train": "test"}), tmp_path / "cache")
    for path in (repository / "data").iterdir():
        path.rename(path.with_suffix(".csv"))
    with pytest.raises(DataError, match="files named train, validation or test"):
        hub_folder(HubData("org/rows"), tmp_path / "cache")
    assert not list((tmp_path / "cache" / "datasets").iterdir())


def test_parquet_names_what_to_install(
    hub: Any, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / "data" / "test.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RuntimeUnavailable, match="pip install pyarrow"):
        hub_folder(HubData("org/rows"), tmp_path / "cache")


@pytest.mark.parametrize(
    ("text", "repo"),
    [("org/rows", "org/rows"), ("./data", None), ("data", None), ("a/b/c", None), ("/a/b", None)],
)
def test_names_of_the_hub_are_told_from_folders(text: str, repo: str | None) -> None:
    found = hub_data(text)
    assert (found.repo if found else None) == repo


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt_feature": "x"}', "has no path"),
        ('{"path": "a/b", "feature": 1}', "no 'feature'; it has path, chat_feature"),
        ('{"path": "a/b", "config": {"name": "en"}}', "cannot be chosen"),
    ],
)
def test_a_wrong_hf_dataset_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        hub_data(text)


def test_the_commands_take_it(
    hub: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("UMA_CACHE_DIR", str(tmp_path / "cache"))
    base = saved_model("full", tmp_path / "model")
    assert main(["lora", "check", str(base), "--data", "org/rows", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {name: one["rows"] for name, one in found["splits"].items()} == {"train": 3, "valid": 1}
    assert main(["lora", "check", str(base), "--data", "./org"]) == 1
    assert "is no folder" in capsys.readouterr().err


def test_a_data_set_of_which_nothing_is_left_fails_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = saved_model("full", tmp_path / "model")
    row = {"prompt": "a long question about many things", "completion": "yes"}
    (tmp_path / "train.jsonl").write_text(lines(row))
    command = ["lora", "check", str(base), "--data", str(tmp_path), "--mask-prompt"]
    assert main(command) == 0
    assert main([*command, "--max-seq-length", "8"]) == 1
    assert "train.jsonl: nothing is left to predict" in capsys.readouterr().out
