"""GGUF models in several files, written by the gguf package."""

from pathlib import Path

import pytest

pytest.importorskip("gguf")
pytest.importorskip("mlx_lm")

from gguf_models import write_gguf

from uma.checkpoint.gguf_split import files_of_model, read_model
from uma.checkpoint.source import locate
from uma.errors import CheckpointError
from uma.runtime.gguf.convert import convert

TYPES = {"token_embd.weight": "Q8_0", "weight": "Q4_1"}


@pytest.fixture
def parts(tmp_path: Path) -> tuple[Path, ...]:
    write_gguf(tmp_path / "m.gguf", "llama", quantize=TYPES, split_max_tensors=4)
    first = next(tmp_path.glob("m-00001-of-*.gguf"))
    found = files_of_model(first)
    assert len(found) > 2
    return found


def test_any_part_gives_the_whole_model(parts: tuple[Path, ...]) -> None:
    source = locate(str(parts[1]))
    assert source.path == parts[0]
    assert source.weight_files == parts
    assert source.weight_bytes == sum(
        read_model(parts[0]).parts[i].size_bytes for i in range(len(parts))
    )


def test_a_split_model_is_converted_as_the_whole_one(
    parts: tuple[Path, ...], tmp_path: Path
) -> None:
    whole = tmp_path / "whole.gguf"
    write_gguf(whole, "llama", quantize=TYPES)
    one, many = (convert(path, tmp_path / path.stem).folder for path in (whole, parts[2]))
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (one / name).read_bytes() == (many / name).read_bytes()


def test_parts_that_do_not_belong_together_are_refused(parts: tuple[Path, ...]) -> None:
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(CheckpointError, match=r"is not file 2 of"):
        read_model(parts[0])


def test_a_renamed_part_is_told_from_a_whole_model(parts: tuple[Path, ...]) -> None:
    renamed = parts[0].rename(parts[0].with_name("renamed.gguf"))
    with pytest.raises(CheckpointError, match=r"one of \d+ files, but its name says 1"):
        read_model(renamed)
