"""Commands are imported when they are called; help, settings and completion know all the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

typer = pytest.importorskip("typer")
from uma.cli import main  # noqa: E402
from uma.cli.app import app, command  # noqa: E402
from uma.cli.commands import COMMANDS, help_text  # noqa: E402

ROOT = Path(__file__).parent.parent


def imported_by(*arguments: str) -> set[str]:
    """The modules that are imported when ``uma`` has run with the arguments."""
    program = (
        "import sys, json\n"
        "from uma.cli import main\n"
        f"main({list(arguments)!r})\n"
        "print(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stderr.splitlines()[-1]))


def test_the_help_is_what_typer_would_print_on_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        app(["--help"], prog_name="uma")
    assert capsys.readouterr().out == help_text() + "\n"


def test_the_help_is_printed_without_typer_and_without_any_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == help_text() + "\n"
    names = imported_by("--help")
    assert not {name for name in names if name.startswith(("typer", "uma.cli.run", "dataclasses"))}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_imports_no_other(name: str) -> None:
    names = imported_by(name, "--help")
    others = {module for other, (module, _) in COMMANDS.items() if other != name}
    assert COMMANDS[name][0] in names
    assert not names & others


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_does_what_its_line_says(name: str) -> None:
    _, line = COMMANDS[name]
    assert line.endswith(".")
    assert line.split()[0] == command(name).help.split()[0]


def test_a_name_close_to_a_commands_is_answered_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bensh"]) == 2
    assert "Did you mean 'bench'?" in capsys.readouterr().err


@pytest.mark.parametrize("asked", ["UMA_SEED", "file"])
def test_a_setting_of_another_command_is_known(
    asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``seed`` is an option of ``run`` and none of ``convert``."""
    monkeypatch.setenv("UMA_CONFIG_DIR", str(tmp_path))
    if asked == "file":
        (tmp_path / "config.toml").write_text("seed = 1\n")
    else:
        monkeypatch.setenv(asked, "1")
    assert main(["convert"]) == 2
    assert "give a model and a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("uma be", "bench"),
        ("uma run --max-to", "--max-tokens"),
        ("uma run llama-3-7", "llama-3-70b"),
    ],
)
def test_the_shell_completes_commands_options_and_models(typed: str, expected: str) -> None:
    words = typed.split()
    asked = {
        "_UMA_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(words) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-m", "uma"],
        cwd=ROOT,
        env=os.environ | asked,
        capture_output=True,
        text=True,
    )
    assert expected in done.stdout.split(), done.stderr


def test_a_reader_that_left_ends_the_help_quietly() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "uma", "--help"],
        cwd=ROOT,
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")
