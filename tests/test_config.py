"""Flag, then variable, then file, then default; and the folders they live in."""

from pathlib import Path

import pytest

from uma.config import Setting, parse_switch, read_config, setting
from uma.errors import UsageError
from uma.paths import cache_folder, config_folder, records_folder, state_folder
from uma.units import GIB, parse_bytes

KNOWN = ("budget", "context", "prefill-step-size", "no-wire")


def test_the_flag_wins_over_the_variable_the_file_and_the_default() -> None:
    config, environ = {"context": "3"}, {"UMA_CONTEXT": "2"}
    assert setting("context", 1, 4, int, config=config, environ=environ) == Setting(1, "--context")
    assert setting("context", None, 4, int, config=config, environ=environ) == Setting(
        2, "UMA_CONTEXT"
    )
    assert setting("context", None, 4, int, config=config, environ={}) == Setting(3, "config.toml")
    assert setting("context", None, 4, int, config={}, environ={}) == Setting(4, "default")


def test_an_empty_variable_counts_as_unset() -> None:
    environ = {"UMA_CONTEXT": ""}
    assert setting("context", None, 4, int, config={}, environ=environ).origin == "default"


def test_dashes_become_underscores_in_the_variable() -> None:
    environ = {"UMA_PREFILL_STEP_SIZE": "512"}
    got = setting("prefill-step-size", None, 2048, int, config={}, environ=environ)
    assert got == Setting(512, "UMA_PREFILL_STEP_SIZE")


def test_a_value_that_cannot_be_read_names_its_origin() -> None:
    for config, environ, origin in (
        ({}, {"UMA_BUDGET": "24"}, "UMA_BUDGET"),
        ({"budget": "24"}, {}, r"config\.toml"),
    ):
        with pytest.raises(UsageError, match=rf"{origin}, budget: '24' is not a size"):
            setting("budget", None, 0, parse_bytes, config=config, environ=environ)


def test_the_file_is_read_with_either_spelling_of_a_name(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('budget = "24GiB"\nprefill_step_size = 512\nno-wire = true\n')
    config = read_config(file, KNOWN)
    assert config == {"budget": "24GiB", "prefill-step-size": "512", "no-wire": "true"}
    assert setting("budget", None, 0, parse_bytes, config=config, environ={}).value == 24 * GIB
    assert setting("no-wire", None, False, parse_switch, config=config, environ={}).value is True


def test_no_file_means_no_settings(tmp_path: Path) -> None:
    assert read_config(tmp_path / "config.toml", KNOWN) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("contxt = 1", "unknown setting 'contxt'; known: budget, context"),
        ("context = [1]", "context must be text, a number, true or false"),
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


def test_a_switch_is_read_as_people_write_it() -> None:
    assert [parse_switch(word) for word in ("1", "Yes", "on", "TRUE")] == [True] * 4
    assert [parse_switch(word) for word in ("0", "no", "OFF", "false")] == [False] * 4
    with pytest.raises(ValueError, match="neither on nor off"):
        parse_switch("maybe")


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
