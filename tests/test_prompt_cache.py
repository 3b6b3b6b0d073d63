"""A processed prompt on disk: reused exactly, refused when it is another's, never half written."""

import json
from pathlib import Path
from typing import Any

import pytest

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

import mlx_lm  # noqa: E402
from mlx_lm.models.cache import load_prompt_cache  # noqa: E402
from models import CONFIGS, saved_model  # noqa: E402

from uma.errors import CheckpointError, StorageError, UsageError  # noqa: E402
from uma.runtime.cache import PromptCache, prompt_cache  # noqa: E402
from uma.runtime.generate import Settings, generate  # noqa: E402
from uma.runtime.load import LoadedModel, load  # noqa: E402
from uma.runtime.prompt_file import (  # noqa: E402
    check_writable,
    fingerprint,
    load_prompt,
    save_prompt,
)

PROMPT = [5 + i % 300 for i in range(70)]


def fresh(loaded: LoadedModel, **options: Any) -> PromptCache:
    return prompt_cache(loaded.model, **{"context_tokens": 256, "kv_group_size": 32} | options)


def answer(loaded: LoadedModel, cache: PromptCache, prompt: list[int], count: int) -> list[int]:
    pieces = generate(loaded, prompt, cache, Settings(max_tokens=count))
    return [p.token for p in pieces if p.token is not None]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    folder = tmp_path_factory.mktemp("models")
    models = {kind: load(saved_model(kind, folder / kind)) for kind in CONFIGS}
    for model in models.values():
        model.tokenizer.eos_token_ids = set()
    return models


@pytest.mark.parametrize("kv_bits", [None, 8])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_saved_prompt_continues_as_if_it_had_been_processed_now(
    kind: str, kv_bits: int | None, loaded: dict[str, LoadedModel], tmp_path: Path
) -> None:
    model, path = loaded[kind], tmp_path / "prompt"
    first = fresh(model, kv_bits=kv_bits)
    said = answer(model, first, PROMPT, 3)
    save_prompt(path, first, model)

    cache = fresh(model, kv_bits=kv_bits)
    assert load_prompt(path, cache, model) == 73
    prompt = [*PROMPT, *said, 9, 8]
    expected = answer(model, first, prompt, 20)
    assert answer(model, cache, prompt, 20) == expected
    assert list(tmp_path.iterdir()) == [path]
    if kv_bits is None:
        theirs = mlx_lm.stream_generate(model.model, model.tokenizer, prompt, max_tokens=20)
        assert [r.token for r in theirs] == expected


def test_another_question_reuses_what_they_share(
    loaded: dict[str, LoadedModel], tmp_path: Path
) -> None:
    model, path = loaded["full"], tmp_path / "prompt.safetensors"
    cache = fresh(model)
    answer(model, cache, PROMPT, 3)
    save_prompt(path, cache, model)
    cache = fresh(model)
    load_prompt(path, cache, model)
    *_, last = generate(model, [*PROMPT[:60], 1, 2, 3], cache, Settings(max_tokens=2))
    assert last.stats is not None
    assert last.stats.reused_tokens == 60


def test_mlx_lm_reads_the_file(loaded: dict[str, LoadedModel], tmp_path: Path) -> None:
    model, path = loaded["full"], tmp_path / "prompt.safetensors"
    cache = fresh(model)
    answer(model, cache, PROMPT, 3)
    save_prompt(path, cache, model)
    layers, metadata = load_prompt_cache(str(path), return_metadata=True)
    assert [layer.offset for layer in layers] == [73] * 4
    assert json.loads(metadata["tokens"]) == cache.tokens


def test_a_fine_tuned_model_of_equal_shapes_is_another_model(
    loaded: dict[str, LoadedModel], tmp_path: Path
) -> None:
    model, path = loaded["full"], tmp_path / "prompt"
    cache = fresh(model)
    answer(model, cache, PROMPT, 3)
    save_prompt(path, cache, model)
    other = load(saved_model("full", tmp_path / "other", seed=1))
    with pytest.raises(UsageError, match="another model"):
        load_prompt(path, fresh(other), other)


def test_the_form_of_the_weights_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    folder = saved_model("full", tmp_path, quantization={"bits": 4, "group_size": 32})
    assert fingerprint(load(folder)) == fingerprint(load(folder))
    assert fingerprint(load(folder)) != fingerprint(load(folder, dequantize_to="float32"))


def test_other_kv_bits_are_refused(loaded: dict[str, LoadedModel], tmp_path: Path) -> None:
    model, path = loaded["full"], tmp_path / "prompt"
    cache = fresh(model, kv_bits=8)
    answer(model, cache, PROMPT, 3)
    save_prompt(path, cache, model)
    for kv_bits in (None, 4):
        with pytest.raises(UsageError, match=r"8 bits.*--kv-bits"):
            load_prompt(path, fresh(model, kv_bits=kv_bits), model)


def test_a_smaller_context_takes_what_fits_or_says_what_would(
    loaded: dict[str, LoadedModel], tmp_path: Path
) -> None:
    for kind in ("full", "recurrent"):
        model, path = loaded[kind], tmp_path / kind
        cache = fresh(model)
        answer(model, cache, PROMPT, 3)
        save_prompt(path, cache, model)
    small = fresh(loaded["full"], context_tokens=50)
    assert load_prompt(tmp_path / "full", small, loaded["full"]) == 50
    assert small.tokens == PROMPT[:50]
    with pytest.raises(UsageError, match="--context"):
        load_prompt(
            tmp_path / "recurrent",
            fresh(loaded["recurrent"], context_tokens=50),
            loaded["recurrent"],
        )


@pytest.mark.parametrize("keep", [0, 7, 100, -1000])
def test_a_cut_file_is_refused(keep: int, loaded: dict[str, LoadedModel], tmp_path: Path) -> None:
    model, path = loaded["full"], tmp_path / "prompt.safetensors"
    cache = fresh(model)
    answer(model, cache, PROMPT, 3)
    save_prompt(path, cache, model)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="damaged"):
        load_prompt(path, fresh(model), model)


def test_other_files_are_refused(loaded: dict[str, LoadedModel], tmp_path: Path) -> None:
    model = loaded["full"]
    path = tmp_path / "weights.safetensors"
    mx.save_safetensors(str(path), {"a": mx.ones((3,))})
    with pytest.raises(CheckpointError, match="no prompt cache"):
        load_prompt(path, fresh(model), model)
    mx.save_safetensors(str(path), {"0.0": mx.ones((3,))}, {"0.tokens": "[1]", "1.0": "os"})
    with pytest.raises(CheckpointError, match="no prompt cache"):
        load_prompt(path, fresh(model), model)


def test_a_failed_write_leaves_the_former_file(
    loaded: dict[str, LoadedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = loaded["full"], tmp_path / "prompt.safetensors"
    path.write_text("former")
    cache = fresh(model)
    answer(model, cache, PROMPT, 3)

    def full(source: Any, target: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(StorageError, match="disk is full"):
        save_prompt(path, cache, model)
    assert path.read_text() == "former"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_does_not_exist_is_named(
    loaded: dict[str, LoadedModel], tmp_path: Path
) -> None:
    model = loaded["full"]
    cache = fresh(model)
    answer(model, cache, PROMPT, 3)
    with pytest.raises(StorageError, match="nowhere"):
        save_prompt(tmp_path / "nowhere" / "prompt", cache, model)


@pytest.mark.parametrize("name", ["file/prompt", "nowhere/prompt", "folder", "n" * 300, "a\0b"])
def test_a_path_that_cannot_be_written_is_refused_before_and_after(
    name: str, loaded: dict[str, LoadedModel], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("a file")
    (tmp_path / "folder").mkdir()
    with pytest.raises(StorageError, match="cannot be written"):
        check_writable(tmp_path / name)
    model = loaded["full"]
    cache = fresh(model)
    answer(model, cache, PROMPT, 3)
    with pytest.raises(StorageError, match="cannot be written"):
        save_prompt(tmp_path / name, cache, model)


def test_a_check_leaves_nothing_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 250)
    check_writable(path)
    assert list(tmp_path.iterdir()) == []
    path.write_text("former")
    check_writable(path)
    assert path.read_text() == "former"
