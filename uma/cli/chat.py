"""A chat on a terminal: the conversation keeps its cache from turn to turn."""

import sys
from contextlib import suppress
from typing import Any

from uma.cli.answer import chat_prompt, cut_text, finish, settings_of, speed_text, stream
from uma.cli.progress import say
from uma.cli.run import RunOptions
from uma.cli.session import Ready, ready
from uma.errors import UsageError

HELP = """\
/help      this list
/clear     forget the conversation
/ledger    the memory ledger of the last answer
/bye       leave (so does Ctrl-D); Ctrl-C stops an answer
Three quotes (\"\"\") begin and end a message of several lines."""


def run_chat(chosen: RunOptions) -> int:
    """Talk until /bye or the end of input."""
    with ready(chosen) as have:
        if not chosen.quiet:
            print("Type a message; /help lists commands.", file=sys.stderr)
        _converse(chosen, have)
    return 0


def _converse(chosen: RunOptions, have: Ready) -> None:
    from uma.report.ledger import ledger_text
    from uma.runtime.session import measured_ledger

    with suppress(ImportError):
        import readline  # noqa: F401  line editing and history for input()

    system = [] if chosen.system is None else [{"role": "system", "content": chosen.system}]
    messages: list[dict[str, Any]] = list(system)
    settings = settings_of(chosen, have)
    measured = None
    while (text := read_message()) is not None:
        match text.strip():
            case "":
                continue
            case "/bye" | "/exit" | "/quit":
                return
            case "/help" | "/?":
                print(HELP, file=sys.stderr)
                continue
            case "/clear":
                messages = list(system)
                say("forgotten")
                continue
            case "/ledger":
                if measured is None:
                    say("no answer yet")
                else:
                    ledger = measured_ledger(have.session, measured)
                    say(ledger_text(ledger, have.planned.plan.budget.winner))
                continue
            case command if command.startswith("/") and " " not in command:
                say(f"unknown command {command}; /help lists them")
                continue
        asked = [*messages, {"role": "user", "content": text}]
        try:
            tokens = chat_prompt(chosen, have, asked)
            reply, measured, _ = stream(chosen, have, tokens, settings)
        except UsageError as error:
            say(f"uma: {error}")
            continue
        messages = [*asked, {"role": "assistant", "content": reply}]
        _after_turn(chosen, have, settings, measured)


def _after_turn(chosen: RunOptions, have: Ready, settings: Any, measured: Any) -> None:
    """One line: speeds and memory; the whole ledger with ``--verbose``."""
    from uma.report.ledger import turn_text
    from uma.runtime.session import measured_ledger

    stats = measured.stats
    if chosen.verbose:
        finish(chosen, have, settings, measured, "")
    elif stats is None:
        say("stopped", chosen.quiet)
    else:
        ledger = measured_ledger(have.session, measured)
        say(f"[{speed_text(stats)}; {turn_text(ledger)}]", chosen.quiet)
    if stats is not None:
        cut = cut_text(stats, settings, have.planned.plan.workload.context_tokens)
        if cut is not None:
            say(cut, chosen.quiet)


def read_message() -> str | None:
    """The next message, of several lines between triple quotes; ``None`` at the end of input."""
    try:
        line = input(">>> ")
        if not line.startswith('"""'):
            return line
        lines = [line[3:]]
        while not lines[-1].rstrip().endswith('"""'):
            lines.append(input("... "))
        lines[-1] = lines[-1].rstrip()[:-3]
        return "\n".join(lines).strip("\n")
    except EOFError:
        print(file=sys.stderr)
        return None
    except KeyboardInterrupt:
        print("\n(Ctrl-D or /bye leaves)", file=sys.stderr)
        return ""
