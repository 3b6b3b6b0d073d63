"""The chat on a real terminal (a pseudo-terminal)."""

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from models import CHAT_TEMPLATE, saved_model
from test_cli_run import environment

pytest.importorskip("mlx.core", reason="runs models")
pty = pytest.importorskip("pty")
fcntl = pytest.importorskip("fcntl")
termios = pytest.importorskip("termios")


class Terminal:
    """A process on a pseudo-terminal, its screen as text."""

    started: ClassVar[list["subprocess.Popen[bytes]"]] = []

    def __init__(self, *arguments: object, home: Path, stdout: int | None = None) -> None:
        self.main, end = pty.openpty()
        command = [sys.executable, "-m", "uma", "run", *map(str, arguments)]
        self.process = subprocess.Popen(
            command,
            stdin=end,
            stdout=end if stdout is None else stdout,
            stderr=end,
            env=environment(home),
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # Ctrl-C comes as a signal
        )
        os.close(end)
        self.started.append(self.process)
        self.screen = ""

    def type(self, text: str) -> None:
        os.write(self.main, text.encode())

    def until(self, text: str, seconds: float = 60) -> str:
        """The screen since the last call, up to ``text``."""
        deadline = time.monotonic() + seconds
        while text not in self.screen:
            assert time.monotonic() < deadline, f"no {text!r} in {self.screen!r}"
            if select.select([self.main], [], [], 0.2)[0]:
                with contextlib.suppress(OSError):
                    self.screen += os.read(self.main, 1 << 16).decode(errors="replace")
        before, _, self.screen = self.screen.partition(text)
        return before + text

    def close(self) -> int:
        try:
            return self.process.wait(timeout=30)
        finally:
            os.close(self.main)


@pytest.fixture(autouse=True)
def none_outlives_its_test() -> Iterator[None]:
    yield
    while Terminal.started:
        process = Terminal.started.pop()
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model("full", tmp_path_factory.mktemp("models") / "full")


@pytest.fixture
def chat(model: Path, tmp_path: Path) -> Terminal:
    terminal = Terminal(model, "--max-tokens", 6, "--context", 600, home=tmp_path)
    terminal.until(">>> ")
    return terminal


def test_each_turn_is_answered_and_followed_by_one_line(chat: Terminal) -> None:
    chat.type("Hello\n")
    assert "peak" in chat.until(">>> ")
    chat.type("/bye\n")
    assert chat.close() == 0


def test_a_second_turn_reuses_the_cache_of_the_first(chat: Terminal) -> None:
    chat.type("Hello\n")
    chat.until(">>> ")
    chat.type("Again\n")
    assert "reused" in chat.until(">>> ")
    chat.type("\x04")
    assert chat.close() == 0


def test_commands_are_listed_and_unknown_ones_named(chat: Terminal) -> None:
    chat.type("/help\n")
    assert "/clear" in chat.until(">>> ")
    chat.type("/nonsense\n")
    assert "unknown command /nonsense" in chat.until(">>> ")
    chat.type("/ledger\n")
    assert "no answer yet" in chat.until(">>> ")
    chat.type("\x04")
    assert chat.close() == 0


def test_a_message_of_several_lines_stands_between_triple_quotes(chat: Terminal) -> None:
    chat.type('"""one\n')
    chat.until("... ")
    chat.type('two"""\n')
    assert "prompt" in chat.until(">>> ")
    chat.type("/ledger\n")
    assert "kv_cache" in chat.until(">>> ")
    chat.type("/bye\n")
    assert chat.close() == 0


@pytest.mark.parametrize("seconds", [0.1, 0.3, 1.5])
def test_ctrl_c_stops_the_answer_and_not_the_chat(
    seconds: float, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the prompt is read, and while it is answered; at once readline may take it, or lose it.

    In a temporary folder of its own, so that MLX's CPU backend has to compile its kernels: its
    compiler gets the signal too.
    """
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    terminal = Terminal(model, "--context", 4000, home=tmp_path)
    terminal.until(">>> ")
    terminal.type("Hello\n")
    terminal.until("Hello")  # before that, the terminal drops what was typed with the signal
    time.sleep(seconds)
    terminal.type("\x03")
    told = terminal.until(">>> ")
    assert "stopped" in told
    assert "tokens/s" not in told  # that of an answer which ran to its end
    terminal.type("/bye\n")
    assert terminal.close() == 0


def test_a_full_context_says_so(model: Path, tmp_path: Path) -> None:
    terminal = Terminal(model, "--context", 48, home=tmp_path)
    terminal.until(">>> ")
    terminal.type("Hello\n")
    terminal.until(">>> ")
    terminal.type("word word word word word word word word word word\n")
    told = terminal.until(">>> ")
    assert "leaves no room in a context of 48" in told
    assert re.search(r"--context \d+ or more; /clear forgets", told)
    terminal.type("/clear\n")
    terminal.until(">>> ")
    terminal.type("Hi\n")
    assert "--context 96 would fit; /clear forgets" in terminal.until(">>> ")
    terminal.type("/bye\n")
    assert terminal.close() == 0


def lines_shown(text: str) -> list[str]:
    """What a screen shows after its control codes: carriage returns, line feeds, cleared lines."""
    lines, column = [""], 0
    for part in re.findall(r"\x1b\[K|[\r\n]|[^\r\n]", text):
        if part == "\r":
            column = 0
        elif part == "\n":
            lines.append("")
            column = 0
        elif part == "\x1b[K":
            lines[-1] = lines[-1][:column]
        else:
            lines[-1] = lines[-1][:column].ljust(column) + part + lines[-1][column + 1 :]
            column += 1
    return lines


def test_the_answer_stands_on_the_screen_whole_and_alone(model: Path, tmp_path: Path) -> None:
    arguments = (model, "Hello", "--max-tokens", 5)
    command = [sys.executable, "-m", "uma", "run", *map(str, arguments)]
    piped = subprocess.run(command, capture_output=True, env=environment(tmp_path), check=True)
    answer = piped.stdout.decode().splitlines()
    assert any(answer)
    terminal = Terminal(*arguments, home=tmp_path)
    screen = lines_shown(terminal.until("cut after"))
    terminal.close()
    start = screen.index(answer[0])
    assert screen[start : start + len(answer)] == answer
    assert not any("reading the prompt" in line or "loading" in line for line in screen)


def test_each_turn_is_recorded(chat: Terminal, tmp_path: Path) -> None:
    for _ in range(2):
        chat.type("Hello\n")
        chat.until(">>> ")
    chat.type("/bye\n")
    assert chat.close() == 0
    records = list((tmp_path / "state" / "records").glob("*.json"))
    assert len(records) == 2
    assert all(json.loads(r.read_text())["speeds"]["generation_tokens"] == 6 for r in records)


def test_json_is_refused_without_a_prompt(model: Path, tmp_path: Path) -> None:
    terminal = Terminal(model, "--json", home=tmp_path)
    terminal.until("--json needs a prompt")
    assert terminal.close() == 2


def test_what_was_thought_is_no_part_of_the_conversation(model: Path, tmp_path: Path) -> None:
    folder = saved_model("full", tmp_path / "thinker")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE + "<think>")
    lengths = []
    for thinking in ("on", "hide"):
        terminal = Terminal(
            folder, "--max-tokens", 6, "--context", 600, "--thinking", thinking, home=tmp_path
        )
        for _ in range(2):
            terminal.until(">>> ")
            terminal.type("Hello\n")
        told = terminal.until(">>> ")
        terminal.type("/bye\n")
        assert terminal.close() == 0
        found = re.search(r"prompt (\d+) tokens", told)
        assert found is not None
        lengths.append(int(found[1]))
    assert lengths[0] == lengths[1]


def test_no_color_reaches_the_terminal(model: Path, tmp_path: Path) -> None:
    """NO_COLOR is honoured by having no colours: none in an answer, its ledger, or an error."""
    for arguments, end in (((model, "Hello", "--max-tokens", 3), "cut after"), (("--x",), "--x")):
        terminal = Terminal(*arguments, home=tmp_path)
        screen = terminal.until(end)
        terminal.close()
        assert re.findall(r"\x1b\[[\d;]*m", screen) == []


def test_stdout_has_answers_alone_where_it_is_no_terminal(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "out"
    with file.open("wb") as out:
        terminal = Terminal(model, "--max-tokens", 6, home=tmp_path, stdout=out.fileno())
    terminal.until(">>> ")
    terminal.type("Hello\n")
    terminal.until(">>> ")
    terminal.type("/bye\n")
    assert terminal.close() == 0
    assert file.read_bytes().strip()
    assert b">>>" not in file.read_bytes()
