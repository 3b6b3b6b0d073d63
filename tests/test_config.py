"""Flag, then variable, then file, then default; and the folders they live in."""

import json
from pathlib import Path

import pytest

from uma.cli import main
from uma.config import read_config
from uma.errors import UsageError
from uma.paths import cache_folder, config_folder, records_folder, state_folder

KNOWN = ("budget", "context", "prefill-step-size", "no-wire")


def planned_context(capsys: pytest.CaptureFixture[str], *arguments: str) -> int:
    """The context that `uma run --dry-run` plans for a catalog model."""
    base = ["run", "llama-3-8b", "--dry-run", "--json", "--force"]
    assert main([*base, *arguments]) == 0
    context = json.loads(capsys.readouterr().out)["settings"]["context_tokens"]
    assert isinstance(context, int)
    return context


def test_the_flag_wins_over_the_variable_and_that_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UMA_CONFIG_DIR", str(tmp_path))
    (tmp_path / "config.toml").write_text("context = 768\n")
    assert planned_context(capsys) == 768
    monkeypatch.setenv("UMA_CONTEXT", "512")
    assert planned_context(capsys) == 512
    assert planned_context(capsys, "--context", "256") == 256


def test_an_empty_variable_counts_as_unset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UMA_CONFIG_DIR", str(tmp_path))
    (tmp_path / "config.toml").write_text("context = 768\n")
    monkeypatch.setenv("UMA_CONTEXT", "")
    assert planned_context(capsys) == 768


def test_a_value_that_cannot_be_read_names_its_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UMA_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("UMA_BUDGET", "24")
    assert main(["run", "llama-3-8b", "--dry-run"]) == 2
    assert "--budget: '24' is not a size" in capsys.readouterr().err


def test_an_unknown_setting_of_the_file_lists_the_known_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UMA_CONFIG_DIR", str(tmp_path))
    (tmp_path / "config.toml").write_text("contxt = 768\n")
    assert main(["run", "llama-3-8b", "--dry-run"]) == 2
    assert "unknown setting 'contxt'; known: adapter-path" in capsys.readouterr().err


def test_the_file_is_read_with_either_spelling_of_a_name(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('budget = "24GiB"\nprefill_step_size = 512\nno-wire = true\n')
    expected = {"budget": "24GiB", "prefill_step_size": "512", "no_wire": "true"}
    assert read_config(file, KNOWN) == expected


def test_no_file_means_no_settings(tmp_path: Path) -> None:
    assert read_config(tmp_path / "config.toml", KNOWN) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("contxt = 1", "unknown setting 'contxt'; known: budget, context"),
        ("context = [[1]]", "context must be text, a number, true or false"),
        ("context = ", "config.toml"),
        ("[run]\ncontext = 1", "unknown setting 'run'"),
        ("\xff", "config.toml"),
    ],
)
def test_a_bad_file_is_a_usage_error(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "config.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match=message):
        read_config(file, KNOWN)


def test_folders_follow_their_variables_and_are_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, folder in (
        ("CACHE", cache_folder),
        ("STATE", state_folder),
        ("CONFIG", config_folder),
    ):
        monkeypatch.setenv(f"UMA_{name}_DIR", str(tmp_path / name))
        assert folder() == tmp_path / name
        assert not folder().exists()
    assert records_folder() == tmp_path / "STATE" / "records"


def test_without_variables_the_system_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CACHE", "STATE", "CONFIG"):
        monkeypatch.delenv(f"UMA_{name}_DIR", raising=False)
    folders = {cache_folder(), state_folder(), config_folder()}
    assert len(folders) == 3
    assert all(folder.is_absolute() and "uma" in folder.parts for folder in folders)


def test_a_folder_may_be_named_from_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.setenv("UMA_CACHE_DIR", "~/models")
    assert cache_folder() == tmp_path / "models"


def test_an_option_that_may_be_given_often_takes_a_list(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('stop = ["a", "b"]\n')
    assert read_config(tmp_path / "config.toml", ["stop"]) == {"stop": ["a", "b"]}


def test_an_option_that_is_given_once_takes_no_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UMA_CONFIG_DIR", str(tmp_path))
    (tmp_path / "config.toml").write_text("context = [1, 2]\n")
    assert main(["run", "llama-3-8b", "--dry-run"]) == 2
    assert "context in config.toml takes one value" in capsys.readouterr().err


def test_a_value_that_nobody_typed_is_named_by_where_it_stands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UMA_CONTEXT", "many")
    assert main(["run", "llama-3-8b", "--dry-run"]) == 2
    assert capsys.readouterr().err.startswith("uma: UMA_CONTEXT: 'many' is not a valid int")


def test_a_file_nested_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("a = " + "[" * 100_000)
    with pytest.raises(UsageError, match="correct the file"):
        read_config(tmp_path / "config.toml", KNOWN)
