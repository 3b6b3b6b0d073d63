"""The chat on a real terminal (a pseudo-terminal)."""

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from models import saved_model
from test_cli_run import environment

pytest.importorskip("mlx.core", reason="runs models")
pty = pytest.importorskip("pty")


class Terminal:
    """A process on a pseudo-terminal, its screen as text."""

    def __init__(self, *arguments: object, home: Path) -> None:
        self.main, end = pty.openpty()
        command = [sys.executable, "-m", "uma", "run", *map(str, arguments)]
        self.process = subprocess.Popen(
            command,
            stdin=end,
            stdout=end,
            stderr=end,
            env=environment(home),
            start_new_session=True,
        )
        os.close(end)
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
            self.process.kill()
            os.close(self.main)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model("full", tmp_path_factory.mktemp("models") / "full")


@pytest.fixture
def chat(model: Path, tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal(model, "--max-tokens", 6, "--context", 600, home=tmp_path)
    terminal.until(">>> ")
    yield terminal
    terminal.process.kill()


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


def test_ctrl_c_stops_the_answer_and_not_the_chat(model: Path, tmp_path: Path) -> None:
    terminal = Terminal(model, "--context", 4000, home=tmp_path)
    terminal.until(">>> ")
    terminal.type("Hello\n")
    time.sleep(1.5)
    terminal.type("\x03")
    terminal.until(">>> ")
    terminal.type("/bye\n")
    assert terminal.close() == 0


def test_a_full_context_says_so(model: Path, tmp_path: Path) -> None:
    terminal = Terminal(model, "--context", 48, home=tmp_path)
    terminal.until(">>> ")
    terminal.type("Hello\n")
    terminal.until(">>> ")
    terminal.type("word word word word word word word word word word\n")
    assert "context" in terminal.until(">>> ")
    terminal.type("/bye\n")
    assert terminal.close() == 0
