"""A fused model as a GGUF file: read back by our reader, which is compared with llama.cpp."""

import json
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf_vocabularies import write_vocabulary
from mlx_lm.utils import load_tokenizer
from models import saved_model
from test_gguf_tokenizer import STRINGS, vocabulary
from test_lora_disk import limited
from test_lora_fuse import FOUR, adapter

from uma.cli import main
from uma.errors import StorageError, UnsupportedModel
from uma.runtime.gguf.convert import convert
from uma.runtime.gguf.tokenizer import write_tokenizer
from uma.runtime.load import load
from uma.runtime.lora.fuse import logits_of
from uma.runtime.lora.gguf_export import export_gguf, require_dense, require_exportable

ROWS = [[5, 9, 200, 31, 7]]


def llama(folder: Path, **settings: Any) -> Path:
    """A small Llama with a SentencePiece vocabulary of 900 tokens."""
    saved_model("full", folder, vocab_size=900, head_dim=16, **settings)
    write_vocabulary(folder.with_suffix(".gguf"), "spm")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink()
    write_tokenizer(vocabulary(folder.with_suffix(".gguf")), folder, 64)
    return folder


def config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def test_the_file_gives_the_logits_and_tokens_of_the_fused_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = llama(tmp_path / "base", quantization=FOUR)
    trained = adapter(base, tmp_path / "adapter")
    out = tmp_path / "fused"
    command = ["lora", "fuse", str(base), "--adapter-path", str(trained), "-o", str(out)]
    capsys.readouterr()
    assert main([*command, "--dequantize", "--export-gguf", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    file = Path(found["gguf"])
    assert found["gguf_bytes"] == file.stat().st_size
    convert(file, tmp_path / "back")
    ours, back = (logits_of(load(f).model, ROWS) for f in (out, tmp_path / "back"))
    plain = logits_of(load(base).model, ROWS)
    assert mx.linalg.norm(back - ours).item() < 1e-3 * mx.linalg.norm(ours - plain).item()
    one, other = (load_tokenizer(f) for f in (out, tmp_path / "back"))
    texts = [text for text in STRINGS if "<" not in text]
    assert [one.encode(t) for t in texts] == [other.encode(t) for t in texts]


def rotated_back(rows: Any, heads: int) -> Any:
    """Rows of a query or key matrix in Hugging Face's order.

    llama.cpp's ``convert_hf_to_gguf.py`` (``LlamaModel.permute``) puts the two halves of a head's
    rows beside each other: this is its inverse.
    """
    width = rows.shape[0] // heads
    return rows.reshape(heads, width // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def test_the_gguf_package_reads_the_tensors_of_the_fused_folder(tmp_path: Path) -> None:
    base = llama(tmp_path / "base", quantization=FOUR)
    out, file = tmp_path / "fused", tmp_path / "fused" / "model.gguf"
    trained = adapter(base, tmp_path / "adapter")
    command = ["lora", "fuse", str(base), "--adapter-path", str(trained), "-o", str(out)]
    assert main([*command, "--dequantize", "--export-gguf", "--gguf-path", str(file)]) == 0
    weights: Any = mx.load(str(out / "model.safetensors"))
    found = {t.name: np.array(t.data) for t in gguf.GGUFReader(file).tensors}
    assert len(found) == len(weights)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 4)
    for name, value in weights.items():
        theirs = found[names.get_name(name, try_suffixes=(".weight",))]
        if "q_proj" in name or "k_proj" in name:
            theirs = rotated_back(
                theirs,
                config(out)["num_key_value_heads" if "k_" in name else "num_attention_heads"],
            )
        assert np.array_equal(theirs.astype(np.float32), np.array(value.astype(mx.float32))), name


def test_a_place_for_the_file_that_cannot_be_is_refused_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "there.gguf"
    there.write_text("mine")
    command = ["lora", "fuse", "no-such-model", "--adapter-path", "none", "-o", str(tmp_path / "o")]
    for path, text in [
        (there, "exists; it is not written over"),
        (tmp_path / "no" / "where.gguf", "is no folder; make it first"),
    ]:
        assert main([*command, "--export-gguf", "--gguf-path", str(path)]) == 2
        assert text in capsys.readouterr().err
    assert main([*command, "--gguf-path", str(tmp_path / "new.gguf")]) == 2
    assert "--gguf-path is of --export-gguf" in capsys.readouterr().err
    assert there.read_text() == "mine"


def test_a_file_that_finds_no_room_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = llama(tmp_path / "base")
    with limited() as limit:
        limit(100_000)
        with pytest.raises(StorageError, match=r"out\.gguf cannot be written: "):
            export_gguf(folder, tmp_path / "out.gguf")
    assert not list(tmp_path.glob("*out*"))


def test_plain_mlx_lm_gives_every_piece_the_same_score(tmp_path: Path) -> None:
    """Merging then goes from the left, whatever the vocabulary says.

    It also writes the types of tokens unsigned, which llama.cpp b11434 refuses to load.
    """
    from mlx_lm.gguf import HfVocab

    folder = llama(tmp_path / "base")
    assert {score for _, score, _ in HfVocab(folder).all_tokens()} == {-1000.0}
    export_gguf(folder, tmp_path / "out.gguf")
    fields = gguf.GGUFReader(tmp_path / "out.gguf").fields
    scores = fields["tokenizer.ggml.scores"]
    assert len({float(scores.parts[n][0]) for n in scores.data}) >= 200
    assert fields["tokenizer.ggml.token_type"].types[-1] == gguf.GGUFValueType.INT32


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "qwen3"}, "it knows llama and mistral, and not qwen3"),
        ({"model_type": "mixtral"}, "and not mixtral"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope scaling 'llama3'"),
        ({"head_dim": 32}, "heads are not as wide"),
        ({"attention_bias": True}, "biases"),
    ],
)
def test_what_it_would_write_wrong_is_refused_with_numbers(
    tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    folder = llama(tmp_path / "base")
    with pytest.raises(UnsupportedModel, match=text) as error:
        require_exportable(folder, config(folder) | changes, 3 << 30)
    assert "6.00 GiB of disk" in str(error.value)
    require_exportable(folder, config(folder), 3 << 30)


def test_a_quantized_fusion_and_other_vocabularies_are_refused_before_loading(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """F2: after minutes of loading, mlx_lm.fuse 0.32.2 says that it is not yet supported."""
    base = llama(tmp_path / "base", quantization=FOUR)
    command = ["lora", "fuse", str(base), "-o", str(tmp_path / "out"), "--export-gguf"]
    trained = adapter(base, tmp_path / "adapter")
    other = {"none.of.this.model": mx.zeros((1,))}  # which would be the error otherwise
    mx.save_safetensors(str(trained / "adapters.safetensors"), other)
    command += ["--adapter-path", str(trained)]
    assert main(command) == 1
    assert "add --dequantize, which takes 1.0 MiB" in capsys.readouterr().err
    require_dense(config(base), True, 1)
    with pytest.raises(UnsupportedModel, match="add --dequantize"):
        require_dense(config(base), False, 1)
    other = saved_model("full", tmp_path / "other", head_dim=16)
    with pytest.raises(UnsupportedModel, match="this one is not"):
        require_exportable(other, config(other), 1)


def test_numbers_beyond_float16_and_an_existing_file_are_refused(tmp_path: Path) -> None:
    folder = llama(tmp_path / "base", dtype="bfloat16")
    out = tmp_path / "out.gguf"
    export_gguf(folder, out)
    kept = out.read_bytes()
    with pytest.raises(StorageError, match="exists"):
        export_gguf(folder, out)
    assert out.read_bytes() == kept
    path = folder / "model.safetensors"
    weights: Any = mx.load(str(path))
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name] = weights[name] + 1e5
    mx.save_safetensors(str(path), weights)
    with pytest.raises(UnsupportedModel, match="beyond float16"):
        export_gguf(folder, tmp_path / "other.gguf")
