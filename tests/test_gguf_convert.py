"""Conversion as a whole: complete or nothing, whatever happens meanwhile."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

resource = pytest.importorskip("resource")  # none on Windows, nor is there MLX
mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

from gguf_models import MODELS, PROMPT, write_gguf  # noqa: E402

from uma.errors import CheckpointError, StorageError, UnsupportedModel, UsageError  # noqa: E402
from uma.quantization import Quantization  # noqa: E402
from uma.runtime.gguf.convert import convert, converted_folder  # noqa: E402

FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of mixed formats: Q4_1 with a Q8_0 embedding, as the default model."""
    path = tmp_path_factory.mktemp("gguf") / "Tiny Model.Q4_1.gguf"
    write_gguf(path, "llama", quantize={"token_embd.weight": "Q8_0", "weight": "Q4_1"})
    return path


def test_mlx_lm_loads_the_folder_and_generates(model: Path, tmp_path: Path) -> None:
    from mlx_lm import load, stream_generate

    report = convert(model, tmp_path / "folder")
    assert {path.name for path in report.folder.iterdir()} == FILES
    assert report.size_bytes == (report.folder / "model.safetensors").stat().st_size
    assert (report.num_exact, report.dtype, report.notes) == (16, "float16", ())
    loaded, tokenizer = load(str(report.folder))
    assert tokenizer.eos_token_ids == {257, 259}
    tokens = [r.token for r in stream_generate(loaded, tokenizer, PROMPT, max_tokens=4)]
    assert len(tokens) >= 1


def test_the_folder_holds_the_ids_and_formats_that_mlx_lm_reads(
    model: Path, tmp_path: Path
) -> None:
    folder = convert(model, tmp_path / "folder").folder
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization"] == {
        "group_size": 32,
        "bits": 4,
        "mode": "affine",
        "model.embed_tokens": {"group_size": 32, "bits": 8, "mode": "affine"},
    }
    assert (config["bos_token_id"], config["eos_token_id"]) == (257, [259, 257])
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [259, 257]


@pytest.mark.parametrize("name", MODELS)
def test_the_tokenizer_of_every_model_type_is_taken_as_written(name: str, tmp_path: Path) -> None:
    """transformers has tokenizer classes of its own for some of them, which split otherwise."""
    from mlx_lm import tokenizer_utils
    from tokenizers import Tokenizer

    write_gguf(tmp_path / "m.gguf", name)
    folder = convert(tmp_path / "m.gguf", tmp_path / "folder").folder
    found = tokenizer_utils.load(folder)
    expected = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in ("hehe 12 HE\n\n", " <|im_end|> he", "\u4f60 \u00e9"):
        assert found.encode(text) == expected.encode(text).ids
        assert found.decode(found.encode(text)) == text


def test_progress_reaches_the_whole_and_never_goes_back(model: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    convert(model, tmp_path / "folder", progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]
    assert len({total for _, total in seen}) == 1


def test_other_types_are_quantized_as_asked_and_the_user_is_told(tmp_path: Path) -> None:
    from mlx_lm.utils import load_model

    write_gguf(tmp_path / "m.gguf", "llama", quantize={"weight": "Q5_0"})
    report = convert(tmp_path / "m.gguf", tmp_path / "8", quantization=Quantization(8, 32))
    assert report.notes == (
        "16 matrices of Q5_0 dequantized, then quantized to affine 8 bits, groups of 32",
    )
    loaded, _ = load_model(tmp_path / "8")
    assert loaded.lm_head.bits == 8
    convert(tmp_path / "m.gguf", tmp_path / "fp4", quantization=Quantization(4, 32, "mxfp4"))
    loaded, _ = load_model(tmp_path / "fp4")
    assert (loaded.lm_head.mode, loaded.lm_head.biases) == ("mxfp4", None)
    report = convert(tmp_path / "m.gguf", tmp_path / "16", quantization=Quantization(16, 32))
    assert report.notes == ("16 matrices of Q5_0 stored as bfloat16",)
    load_model(tmp_path / "16")


def test_scales_too_large_for_float16_are_kept_in_float32(tmp_path: Path) -> None:
    import numpy as np
    from gguf_models import original

    huge = original("llama")
    for layer in huge.layers:
        layer.self_attn.v_proj.weight *= 3e5
    write_gguf(
        tmp_path / "m.gguf", "llama", huge, quantize={"attn_v.weight": "Q8_0", "weight": "Q4_1"}
    )
    folder = convert(tmp_path / "m.gguf", tmp_path / "folder").folder
    weights = mx.load(str(folder / "model.safetensors"))
    wide = {name for name, array in weights.items() if array.dtype == mx.float32}
    layers = [f"model.layers.{i}.self_attn.v_proj" for i in (0, 1)]
    assert wide == {f"{layer}.{part}" for layer in layers for part in ("scales", "biases")}
    assert np.isfinite(np.array(weights[f"{layers[0]}.biases"])).all()


def test_an_existing_folder_is_never_written_into(model: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match="exists"):
        convert(model, tmp_path / "folder")
    assert not list((tmp_path / "folder").iterdir())


def test_a_stop_from_the_keyboard_leaves_nothing(model: Path, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(model, tmp_path / "out" / "folder", progress=stop)
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.1, 0.5, 0.999])
def test_a_cut_file_is_refused_and_leaves_nothing(
    model: Path, tmp_path: Path, fraction: float
) -> None:
    data = model.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(data[: int(len(data) * fraction)])
    with pytest.raises(CheckpointError):
        converted_folder(cut, tmp_path / "cache")
    assert not [p for p in (tmp_path / "cache").iterdir() if p.is_dir()]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nothing\.gguf"):
        converted_folder(tmp_path / "nothing.gguf", tmp_path / "cache")


def test_a_full_disk_is_told_before_anything_is_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(StorageError, match="1,000 are free"):
        convert(model, tmp_path / "out" / "folder")
    assert not list((tmp_path / "out").iterdir())


def test_a_write_that_fails_midway_leaves_nothing(model: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(StorageError, match="cannot be written"):
            convert(model, tmp_path / "out" / "folder")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list((tmp_path / "out").iterdir())


def test_a_parent_that_is_a_file_is_a_storage_error(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        convert(model, tmp_path / "file" / "folder")
    with pytest.raises(StorageError):
        converted_folder(model, tmp_path / "file")


def test_the_cache_converts_once_for_a_file_and_a_format(model: Path, tmp_path: Path) -> None:
    calls: list[int] = []
    folders = {
        converted_folder(model, tmp_path, progress=lambda done, total: calls.append(done))
        for _ in range(3)
    }
    (folder,) = folders
    assert folder.name.startswith("Tiny-Model.Q4_1-")
    assert calls == sorted(set(calls))
    assert converted_folder(model, tmp_path, quantization=Quantization(3, 64)) != folder
    os.utime(model, ns=(0, 0))
    assert converted_folder(model, tmp_path) != folder


RUN = """
import os, signal, sys
from pathlib import Path
from uma.runtime.gguf.convert import converted_folder

def progress(done, total):
    {body}

print(converted_folder(Path(sys.argv[1]), Path(sys.argv[2]), progress=progress))
"""


def run(model: Path, cache: Path, body: str) -> subprocess.Popen[str]:
    code = textwrap.dedent(RUN).format(body=body)
    return subprocess.Popen(
        [sys.executable, "-c", code, str(model), str(cache)], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("done", ["done > 0", "done > total // 2", "done == total"])
def test_after_a_kill_the_next_run_begins_anew_and_clears_the_rest(
    model: Path, tmp_path: Path, done: str
) -> None:
    process = run(model, tmp_path, f"if {done}: os.kill(os.getpid(), signal.SIGKILL)")
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    (left,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert left.name.startswith(".")
    folder = converted_folder(model, tmp_path)
    assert {path.name for path in folder.iterdir()} == FILES
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [folder]


def test_of_two_processes_one_converts_and_both_get_the_folder(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    body = f"done == total and open({str(log)!r}, 'a').write('x')"
    cache = tmp_path / "cache"
    processes = [run(model, cache, body) for _ in range(2)]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0] == outputs[1]
    assert log.read_text() == "x"


def test_memory_does_not_grow_with_the_tensor(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of 16 rows give the same file as whole tensors."""
    from uma.runtime.gguf import tensors

    whole = convert(model, tmp_path / "whole").folder / "model.safetensors"
    monkeypatch.setattr(tensors, "CHUNK_ELEMENTS", 16 * 64)
    parts = convert(model, tmp_path / "parts").folder / "model.safetensors"
    assert whole.read_bytes() == parts.read_bytes()


def test_an_architecture_that_is_not_known_leaves_nothing(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match="mamba"):
        convert(tmp_path / "m.gguf", tmp_path / "out" / "folder")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("tensor", "shape"),
    [
        ("blk.0.attn_q.weight", (62, 64)),
        ("blk.1.attn_k.weight", (64, 64)),
        ("blk.0.attn_norm.weight", (32,)),
        ("blk.0.attn_norm.weight", (64, 1)),
        ("output.weight", (10, 64)),
        ("blk.1.ffn_down.weight", (64, 32)),
        ("token_embd.weight", (200, 64)),
    ],
)
def test_a_tensor_of_another_shape_than_its_metadata_asks_for_is_named(
    tmp_path: Path, tensor: str, shape: tuple[int, ...]
) -> None:
    write_gguf(tmp_path / "m.gguf", "llama", shapes={tensor: shape})
    with pytest.raises(CheckpointError, match=r"has shape|tokens for 200|columns expected"):
        convert(tmp_path / "m.gguf", tmp_path / "folder")
    assert not (tmp_path / "folder").exists()
