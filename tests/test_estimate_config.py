"""What `uma estimate` reads from elsewhere: a model's config.json, and its own settings."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from uma.architecture import architecture_from_config
from uma.catalog import find_model, model_config
from uma.cli import main
from uma.config import read_config
from uma.errors import CheckpointError, UsageError


def llama(**other: Any) -> dict[str, Any]:
    row = find_model("meta-llama/Meta-Llama-3-8B-Instruct")
    assert row is not None
    return {**model_config(row).values, **other}


@pytest.mark.parametrize("kinds", ["full", [1, 2], {"full_attention": 2}, 7])
def test_layer_types_that_are_no_list_of_names_are_refused(kinds: Any) -> None:
    with pytest.raises(CheckpointError, match=r"layer_types .* no list of names"):
        architecture_from_config(llama(layer_types=kinds))


@pytest.mark.parametrize("tied", ["false", "true", 0, []])
def test_tied_embeddings_are_true_or_false(tied: Any) -> None:
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings .* neither true nor false"):
        architecture_from_config(llama(tie_word_embeddings=tied))
    assert architecture_from_config(llama(tie_word_embeddings=None)).num_parameters > 7e9


def test_a_model_type_of_100_kb_is_not_shown_whole() -> None:
    for values in ({"model_type": "x" * 100_000}, llama(layer_types="x" * 100_000)):
        with pytest.raises(CheckpointError) as error:
            architecture_from_config(values)
        assert len(str(error.value)) < 300


@pytest.mark.skipif(os.name != "posix", reason="the permissions of POSIX")
def test_settings_in_a_folder_that_may_not_be_read_are_named(tmp_path: Path) -> None:
    tmp_path.chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root may read everything
    try:
        with pytest.raises(UsageError, match=r"settings cannot be read.*XDG_CONFIG_HOME"):
            read_config(tmp_path / "uma" / "config.toml", ["budget"])
    finally:
        os.seteuid(user)
        tmp_path.chmod(stat.S_IRWXU)


def test_a_folder_of_settings_with_too_long_a_name_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/" + "x" * 5000)
    assert main(["estimate", "llama-3-8b", "--ram", "64GB"]) == 2
    assert "settings cannot be read" in capsys.readouterr().err
