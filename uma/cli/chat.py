"""A chat on a terminal: the conversation keeps its cache from turn to turn."""

import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from uma.cli.answer import (
    Reply,
    chat_prompt,
    cut_of,
    finish,
    message,
    report_of,
    settings_of,
    stream,
    system_message,
)
from uma.cli.options import RunOptions
from uma.cli.outcome import keep
from uma.cli.progress import say
from uma.cli.session import Ready, ready
from uma.errors import UsageError

if TYPE_CHECKING:
    from uma.runtime.generate import Settings

HELP = """\
/help      this list
/clear     forget the conversation
/ledger    the memory ledger of the last answer
/bye       leave (so does Ctrl-D); Ctrl-C stops an answer
Three quotes (\"\"\") begin and end a message of several lines."""

CLEAR = "; /clear forgets the conversation"


@dataclass(slots=True)
class _Chat:
    chosen: RunOptions
    have: Ready
    settings: "Settings"
    messages: list[dict[str, Any]]
    last: Reply | None = None


def run_chat(chosen: RunOptions) -> int:
    """Talk until /bye or the end of input.

    Raises:
        UsageError: If JSON is asked for, which has room for one answer.
    """
    if chosen.json:
        raise UsageError("--json needs a prompt; give one with --prompt, or pipe it in")
    with ready(chosen) as have:
        if not chosen.quiet:
            print("Type a message; /help lists commands.", file=sys.stderr)
        _converse(_Chat(chosen, have, settings_of(chosen, have), system_message(chosen)))
    return 0


def _converse(chat: _Chat) -> None:
    with suppress(ImportError):
        import readline  # noqa: F401  line editing and history for input()

    while (text := read_message()) is not None:
        command = text.strip()
        if command in ("/bye", "/exit", "/quit"):
            return
        if command.startswith("/") and " " not in command:
            _obey(chat, command)
        elif command:
            try:
                _turn(chat, text)
            except KeyboardInterrupt:  # before the answer began, or after it ended
                say("stopped", chat.chosen.quiet)


def _obey(chat: _Chat, command: str) -> None:
    match command:
        case "/help" | "/?":
            print(HELP, file=sys.stderr)
        case "/clear":
            chat.messages = system_message(chat.chosen)
            say("forgotten")
        case "/ledger":
            say("no answer yet" if chat.last is None else _ledger_text(chat.have, chat.last))
        case _:
            say(f"unknown command {command}; /help lists them")


def _ledger_text(have: Ready, reply: Reply) -> str:
    from uma.report.ledger import ledger_text
    from uma.runtime.session import measured_ledger

    ledger = measured_ledger(have.session, reply.measured)
    return ledger_text(ledger, have.planned.plan.budget.winner)


def _turn(chat: _Chat, text: str) -> None:
    asked = [*chat.messages, message("user", text)]
    tokens: list[int] = []
    try:
        tokens = chat_prompt(chat.chosen, chat.have.session.loaded.tokenizer, asked)
        reply = stream(chat.chosen, chat.have, tokens, chat.settings)
    except UsageError as error:
        full = len(tokens) >= chat.have.planned.plan.workload.context_tokens
        say(f"uma: {error}{CLEAR if full else ''}")
        return
    if reply.text or not reply.interrupted:
        chat.messages = [*asked, message("assistant", reply.text)]
    chat.last = reply
    if chat.chosen.verbose:
        finish(chat.chosen, chat.have, chat.settings, reply)
    else:
        _tell_turn(chat, reply)


def _tell_turn(chat: _Chat, reply: Reply) -> None:
    """One line, speeds and memory, and one on why the answer was cut; the turn is recorded."""
    from uma.report.answer import speed_text
    from uma.report.ledger import turn_text
    from uma.runtime.session import measured_ledger

    quiet, stats = chat.chosen.quiet, reply.measured.stats
    ledger = measured_ledger(chat.have.session, reply.measured)
    if stats is None:
        say("stopped", quiet)
    else:
        say(f"[{speed_text(stats)}; {turn_text(ledger)}]", quiet)
        cut = cut_of(chat.have, chat.settings, stats)
        if cut is not None:
            full = stats.finish_reason == "context"
            say(f"{cut}{CLEAR if full else ''}", quiet)
    keep(chat.chosen, chat.have, report_of(chat.have, chat.settings, stats, ledger))


def read_message() -> str | None:
    """The next message, of several lines between triple quotes; ``None`` at the end of input."""
    try:
        line = _read_line(">>> ")
        if not line.startswith('"""'):
            return line
        lines = [line[3:]]
        while not lines[-1].rstrip().endswith('"""'):
            lines.append(_read_line("... "))
        lines[-1] = lines[-1].rstrip()[:-3]
        return "\n".join(lines).strip("\n")
    except EOFError:
        print(file=sys.stderr)
        return None
    except KeyboardInterrupt:
        print("\n(Ctrl-D or /bye leaves)", file=sys.stderr)
        return ""


def _read_line(prompt: str) -> str:
    """A line of input; stdout has answers alone where it is no terminal."""
    if sys.stdout.isatty():
        return input(prompt)
    print(prompt, end="", file=sys.stderr, flush=True)
    return input()
