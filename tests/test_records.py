"""Records hold sizes and versions, and nothing that a person typed or owns."""

import getpass
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from uma.ledger import Ledger
from uma.memory.term import MemoryTerm
from uma.records import model_name, read_records, sanitize, write_record

SECRET = "My passphrase is xyzzy and my doctor said"

RECORD = {
    "command": "uma run",
    "model": {"name": "smollm2-135m", "kind": "catalog", "config_basis": "exact", "repo": None},
    "machine": {
        "name": "Apple M4 Max, 64 GiB",
        "memory_bytes": 68719476736,
        "chip": "Apple M4 Max",
        "os": "macOS",
        "os_version": "26.1",
        "gpu_cores": None,
    },
    "versions": {"mlx": "0.32.4", "mlx_lm": "0.32.2", "uma": "0.1.0", "python": "3.11.7"},
    "settings": {
        "context_tokens": 8192,
        "temp": 0.7,
        "form": "affine 4/32",
        "budget_source": "memory less a reserve of 1.47 GiB for the system",
        "blas": "OpenBLAS 0.3.31",
    },
    "process": {"kind": "footprint", "current_bytes": 10, "peak_bytes": 20},
    "ledger": Ledger(
        (MemoryTerm("weights", 10, "exact", "catalog shapes × affine 4/64"),), 100, 200, "fits"
    ).to_json(),
    "speeds": {"prompt_tps": 211.0, "generation_tps": 25.8},
}


def test_a_record_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    written = write_record(RECORD, tmp_path / "records")
    assert written.note is None
    (record,) = read_records(tmp_path / "records")
    assert record.pop("schema_version") == 1
    assert str(record.pop("time")).endswith("Z")
    assert record == RECORD


HOSTILE = [
    {"prompt": SECRET},
    {"answer": SECRET},
    {"settings": {"prompt": SECRET, "system": SECRET, "stop": [SECRET]}},
    {"settings": {"prompt_token_ids": [1, 2, 3]}},
    {"settings": {SECRET: 1}},
    {"settings": {"form": SECRET * 5}},
    {"settings": {"form": f"on\n{SECRET}"}},
    {"model": {"path": "/home/ann/xyzzy"}},
    {"model": {"name": "/home/ann/xyzzy"}},
    {"model": {"name": "~/xyzzy"}},
    {"model": {"name": "../xyzzy"}},
    {"model": {"name": "C:\\Users\\ann\\xyzzy"}},
    {"model": {"name": "C:/Users/ann/xyzzy"}},
    {"model": {"name": "\\\\server\\xyzzy"}},
    {"ledger": {"terms": [{"name": "weights", "source": "headers of /data/xyzzy/model.gguf"}]}},
    {"ledger": {"terms": [{"name": "weights", "source": "file:///data/xyzzy"}]}},
    {"ledger": {"terms": ["xyzzy"]}},
    {"notes": ["xyzzy"]},
    {"command": f"uma run {SECRET}"},
    {"command": "uma run xyzzy"},
    {"settings": {"thinking": SECRET}},
    {"environment": {"HOME": "/home/xyzzy"}},
    {"versions": {"uma": b"xyzzy"}},
]


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda h: str(h)[:60])
def test_nothing_that_a_person_typed_or_owns_is_kept(
    hostile: dict[str, object], tmp_path: Path
) -> None:
    written = write_record({**RECORD, **hostile}, tmp_path)
    assert written.path is not None
    text = written.path.read_text(encoding="utf-8")
    for word in ("xyzzy", "passphrase", "ann", "prompt_token_ids"):
        assert word not in text


def test_the_names_of_host_and_user_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "node", lambda: "Annes-Mac.local")
    monkeypatch.setattr(getpass, "getuser", lambda: "annelise")
    monkeypatch.setenv("HOME", "/Users/annelise")
    for text in ("Annes-Mac.local", "annes-mac", "Mac of annelise", "annelise/my-model"):
        assert sanitize({"machine": {"name": text}}) == {"machine": {"name": None}}
    kept = {
        "machine": {"name": "Apple M4, 16 GiB"},
        "model": {"name": "mlx-community/Qwen3-4B-4bit"},
    }
    assert sanitize(kept) == kept


def test_sections_that_a_record_does_not_have_are_left_out() -> None:
    assert sanitize({"speeds": {"load_s": 1.5}, "window": {"width": 80}}) == {
        "speeds": {"load_s": 1.5}
    }


def test_a_local_folder_is_named_only_by_a_public_name() -> None:
    known = ("llama-3-8b", "qwen3-30b-a3b")
    assert model_name("/data/models/Llama-3-8B", local=True, known=known) == "llama-3-8b"
    assert model_name("/data/models/my-diary-lora", local=True, known=known) == "local model"
    assert model_name("org/model", local=False, known=known) == "org/model"


def test_runs_at_once_keep_a_record_each(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        paths = {
            written.path
            for written in pool.map(lambda _: write_record(RECORD, tmp_path), range(40))
        }
    assert len(paths) == 40
    assert len(read_records(tmp_path)) == 40
    assert not list(tmp_path.glob("*.tmp"))


def test_a_folder_that_cannot_be_written_is_a_note_and_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    written = write_record(RECORD, tmp_path / "file" / "records")
    assert written.path is None
    assert written.note is not None
    assert "no record kept" in written.note


def test_files_that_are_no_records_are_left_out(tmp_path: Path) -> None:
    write_record(RECORD, tmp_path)
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "b.json").write_text("[]")
    (tmp_path / "c.json").write_text('{"schema_version": 99}')
    (tmp_path / "d.json").write_bytes(b"\xff\xfe")
    assert len(read_records(tmp_path)) == 1
    assert read_records(tmp_path / "missing") == []
