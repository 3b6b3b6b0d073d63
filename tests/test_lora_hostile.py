"""Files that others made: settings in YAML and adapters of PEFT that are wrong on purpose."""

import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from models import CONFIGS, build_model

from uma.cli import main
from uma.errors import CheckpointError, UmaError
from uma.runtime.lora.peft import from_peft

BOMB = "keys: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"k{n}: &k{n} [{', '.join([f'*k{n - 1}' if n else '*a'] * 9)}]\n" for n in range(9)
)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (BOMB, "*a is an alias: write it out"),
        ("&a iters: *a\n", "*a is an alias"),
        ("keys: &a [*a]\n", "*a is an alias"),
        ("iters: 5\niters: 7\n", "iters is given twice"),
        ("batch-size: 5\nbatch_size: 7\n", "batch_size is given twice"),
        ("lora_parameters: {rank: 1, rank: 2}\n", "rank is given twice"),
        ("iters: !!python/object/apply:os.system ['touch owned']\n", "is not YAML"),
        ("[" * 5000, "is not YAML"),
        ("iters: 1\n---\niters: 2\n", "expected a single document"),
        ("? [a, b]\n: c\n", "unhashable key"),
        ("iters: 5\x00\n", "is not YAML"),
        ("#" * (1 << 20) + "\niters: 5\n", "is larger than 1 MiB"),
        ("lora_parameters: {rank: 999999999999999999999}\n", "rank: 999999999999999999999 is not"),
        ("iters: five\n", "iters: 'five' is not"),
        ("packing: 'yes'\n", "packing: 'yes' is not true or false"),
        ("keys: [{a: 1}]\n", "keys: {'a': 1} instead of one value"),
    ],
    ids=range(16),
)
def test_a_file_of_settings_does_nothing_but_set_options(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: str,
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text(content)
    assert main(["lora", "train", "--data", "data", "-c", "own.yaml"]) == 2
    told = capsys.readouterr().err
    assert text in told
    assert len(told) < 1500
    assert os.listdir() == ["own.yaml"]


NAME = "base_model.model.model.layers.3.self_attn.q_proj.lora_"
A, B = np.ones((4, 64), np.float32), np.ones((128, 4), np.float32)
SETTINGS = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}


def peft(folder: Path, a: Any = A, b: Any = B, name: str = NAME, **settings: Any) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(SETTINGS | settings))
    arrays = {f"{name}A.weight": mx.array(a), f"{name}B.weight": mx.array(b)}
    mx.save_safetensors(str(folder / "adapter_model.safetensors"), arrays)
    return folder


@pytest.fixture(scope="module")
def model() -> Any:
    return build_model(CONFIGS["full"])


def test_what_the_others_are_wrong_copies_of_is_taken(tmp_path: Path, model: Any) -> None:
    assert len(from_peft(peft(tmp_path / "a"), model)[1]) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "base_model.model.../../../../etc/passwd.lora_"},
        {"name": "base_model.model..lora_"},
        {"a": B, "b": A},
        {"a": A[:3]},
        {"a": A[:0], "b": B[:, :0]},
        {"a": A[0]},
        {"a": A * np.nan},
        {"b": B.astype(np.int32)},
        {"b": B.astype(np.complex64)},
        {"lora_alpha": "eight"},
        {"lora_alpha": None},
        {"lora_alpha": [8]},
        {"lora_alpha": float("nan")},
        {"alpha_pattern": [1]},
        {"alpha_pattern": {"(((": 3}},
        {"alpha_pattern": {"q_proj": "x"}},
        {"lora_dropout": "x"},
        {"lora_dropout": 5},
        {"peft_type": ["LORA"]},
        {"layer_replication": [[0, 2]]},
    ],
    ids=str,
)
def test_a_wrong_adapter_is_refused_in_a_line(tmp_path: Path, model: Any, wrong: Any) -> None:
    with pytest.raises(UmaError) as error:
        from_peft(peft(tmp_path / "a", **wrong), model)
    assert "\n" not in str(error.value)


def test_a_module_without_scale_is_taken_beside_one_that_has_it(tmp_path: Path, model: Any) -> None:
    folder = peft(tmp_path / "a", lora_alpha=0, alpha_pattern={"v_proj": 12})
    weights = str(folder / "adapter_model.safetensors")
    other, b = NAME.replace("q_proj", "v_proj"), np.ones((64, 4), np.float32)
    arrays = {f"{other}A.weight": mx.array(A), f"{other}B.weight": mx.array(b)}
    mx.save_safetensors(weights, {**mx.load(weights), **arrays})
    adapter, found = from_peft(folder, model)
    assert adapter.scale == 3.0
    inside = "model.layers.3.self_attn"
    assert not found[f"{inside}.q_proj.lora_b"].any().item()
    assert mx.array_equal(found[f"{inside}.v_proj.lora_b"], mx.array(b.T))


def header(tensor: dict[str, Any]) -> bytes:
    whole = {"dtype": "F32", "shape": [4, 64], "data_offsets": [0, 1024]} | tensor
    text = json.dumps({f"{NAME}A.weight": whole}).encode()
    return struct.pack("<Q", len(text)) + text + b"\0" * 1024


@pytest.mark.parametrize(
    "content",
    [
        b"",
        struct.pack("<Q", 1 << 62) + b"{}",
        struct.pack("<Q", 1 << 33) + b"{}",
        struct.pack("<Q", 50_000) + b"[" * 50_000,
        header({"data_offsets": [0, 1 << 40]}),
        header({"shape": [1 << 40, 1 << 40]}),
        header({"shape": [4, -64]}),
        header({"dtype": "F99"}),
    ],
    ids=range(8),
)
def test_a_file_of_tensors_that_is_none_is_refused(
    tmp_path: Path, model: Any, content: bytes
) -> None:
    folder = peft(tmp_path / "a")
    (folder / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be read"):
        from_peft(folder, model)


def test_a_pickle_is_never_opened(tmp_path: Path, model: Any) -> None:
    folder = peft(tmp_path / "a")
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(os.system))
    with pytest.raises(CheckpointError, match=r"\.bin files can run code"):
        from_peft(folder, model)
    (folder / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="cannot be read"):
        from_peft(folder, model)
