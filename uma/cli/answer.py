"""One prompt, or many at once: the answer on stdout, the ledger on stderr."""

import json
import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from uma.cli.options import RunOptions
from uma.cli.outcome import keep, ledger_lines, run_json
from uma.cli.progress import progress, say
from uma.cli.session import Ready, ready, template_config
from uma.errors import UsageError

if TYPE_CHECKING:
    from uma.ledger import Ledger
    from uma.measurement.generation import Stats
    from uma.plan.inference import InferencePlan
    from uma.runtime.generate import Piece, Settings
    from uma.runtime.session import Measured


@dataclass(slots=True)
class Reply:
    """What was said, without what was thought; what was measured; whether Ctrl-C ended it."""

    measured: "Measured"
    text: str = ""
    thinking: str = ""
    interrupted: bool = False


def run_prompt(chosen: RunOptions) -> int:
    """Answer one prompt."""
    prompt = messages_of(chosen, prompt_text(chosen))
    with ready(chosen, check=partial(_check, chosen, prompt)) as have:
        return _answer(chosen, have, prompt)


def _check(
    chosen: RunOptions, messages: list[dict[str, Any]], plan: "InferencePlan", tokenizer: Any
) -> None:
    """Raise what would stop the answer only after minutes of loading."""
    from uma.runtime.generate import generation_limit
    from uma.runtime.prompt_file import check_writable

    tokens = chat_prompt(chosen, tokenizer, messages)
    generation_limit(len(tokens), plan.workload.context_tokens, chosen.max_tokens)
    if chosen.prompt_cache is not None:
        check_writable(chosen.prompt_cache)


def prompt_text(chosen: RunOptions) -> str:
    """The prompt; from stdin where it is ``-`` or missing.

    Raises:
        UsageError: If it is empty.
    """
    text = chosen.prompt
    if text is None or text == "-":
        text = "" if sys.stdin is None else sys.stdin.read()
    if not text.strip():
        raise UsageError("the prompt is empty; give one with --prompt, or pipe it in")
    return text


def messages_of(chosen: RunOptions, prompt: str) -> list[dict[str, Any]]:
    return [*system_message(chosen), message("user", prompt)]


def system_message(chosen: RunOptions) -> list[dict[str, Any]]:
    return [] if chosen.system is None else [message("system", chosen.system)]


def message(role: str, content: str) -> dict[str, Any]:
    """A message of a chat; bytes that are no text, which an argument can hold, become ``?``."""
    return {"role": role, "content": content.encode("utf-8", "replace").decode()}


def chat_prompt(chosen: RunOptions, tokenizer: Any, messages: list[dict[str, Any]]) -> list[int]:
    from uma.runtime.template import chat_tokens

    return chat_tokens(
        tokenizer,
        messages,
        thinking=chosen.thinking != "off",
        template_config=template_config(chosen),
    )


def settings_of(chosen: RunOptions, have: Ready) -> "Settings":
    """The sampling of the model's own ``generation_config.json``, changed by what was asked."""
    from uma.runtime.generate import Settings, sampling_defaults

    asked = {
        name: value
        for name in ("temp", "top_p", "min_p", "top_k", "seed")
        if (value := getattr(chosen, name)) is not None
    }
    return Settings(
        sampling=replace(sampling_defaults(have.session.loaded.folder), **asked),
        max_tokens=chosen.max_tokens,
        prefill_step_size=have.planned.plan.workload.prefill_step_size,
        stop=chosen.stop,
        num_draft_tokens=chosen.num_draft_tokens,
    )


def _answer(chosen: RunOptions, have: Ready, messages: list[dict[str, Any]]) -> int:
    from uma.runtime.prompt_file import load_prompt, save_prompt

    session, file = have.session, chosen.prompt_cache
    tokens = chat_prompt(chosen, session.loaded.tokenizer, messages)
    settings = settings_of(chosen, have)
    if file is not None and file.exists():
        load_prompt(file, session.cache, session.loaded)
    reply = stream(chosen, have, tokens, settings)
    finish(chosen, have, settings, reply)
    if reply.interrupted:  # the file may hold more than the cache does now
        return 130
    if file is not None:
        save_prompt(file, session.cache, session.loaded)
    return 0


def stream(chosen: RunOptions, have: Ready, tokens: list[int], settings: "Settings") -> Reply:
    """Write the answer as it comes, its thinking to stderr."""
    from uma.runtime.measure import PhaseMeter
    from uma.runtime.session import Measured, answer

    reply = Reply(Measured(PhaseMeter()))
    try:
        with progress("reading the prompt", quiet=chosen.quiet) as show:
            pieces = answer(have.session, tokens, settings, reply.measured, show)
            first = next(pieces)  # the line of the progress is gone before any text
        for piece in chain([first], pieces):
            _take(chosen, reply, piece)
    except KeyboardInterrupt:
        reply.interrupted = True
    if not chosen.json:
        print(flush=True)
    return reply


def _take(chosen: RunOptions, reply: Reply, piece: "Piece") -> None:
    if not piece.text or (piece.thinking and chosen.thinking == "hide"):
        return
    shown = not chosen.json
    if piece.thinking:
        reply.thinking += piece.text
        if shown and not chosen.quiet:
            print(piece.text, end="", file=sys.stderr, flush=True)
        return
    if shown and reply.thinking and not reply.text and not reply.thinking.endswith("\n"):
        say("", chosen.quiet)
    reply.text += piece.text
    if shown:
        print(piece.text, end="", flush=True)


def finish(chosen: RunOptions, have: Ready, settings: "Settings", reply: Reply) -> None:
    """Report and record one answer."""
    from uma.runtime.session import measured_ledger

    ledger = measured_ledger(have.session, reply.measured)
    report = report_of(have, settings, reply.measured.stats, ledger)
    if chosen.json:
        print(json.dumps({"text": reply.text, "thinking": reply.thinking} | report, indent=2))
    elif not chosen.quiet:
        say(_summary(have, settings, reply.measured.stats, ledger, report))
    keep(chosen, have, report)


def report_of(
    have: Ready, settings: "Settings", stats: "Stats | None", ledger: "Ledger"
) -> dict[str, Any]:
    """One answer as JSON, but for its text."""
    return _speeds(stats) | run_json(have, settings, ledger)


def _speeds(stats: "Stats | None") -> dict[str, Any]:
    names = (
        "prompt_tokens",
        "reused_tokens",
        "generation_tokens",
        "draft_tokens",
        "prompt_tps",
        "generation_tps",
        "ttft_s",
        "finish_reason",
    )
    found = {} if stats is None else asdict(stats)
    return {name: found.get(name) for name in names}


def _summary(
    have: Ready,
    settings: "Settings",
    stats: "Stats | None",
    ledger: "Ledger",
    report: dict[str, Any],
) -> str:
    """The ledger of one answer, its speeds, and why it ended if not at its own end."""
    from uma.report.answer import speed_text

    lines = ledger_lines(have, ledger, report)
    if stats is None:
        return "\n".join([*lines, "interrupted"])
    lines.append(speed_text(stats, have.session.load_s))
    cut = cut_of(have, settings, stats)
    return "\n".join([*lines, *([cut] if cut else [])])


def cut_of(have: Ready, settings: "Settings", stats: "Stats") -> str | None:
    """Why an answer is cut, or ``None``."""
    from uma.report.answer import cut_text
    from uma.runtime.session import longer_context

    plan = have.planned.plan
    longer = longer_context(plan) if stats.finish_reason == "context" else None
    return cut_text(stats, settings.max_tokens, plan.workload.context_tokens, longer)


def run_batch(chosen: RunOptions) -> int:
    """Answer the prompts of a file at once; each answer as a JSON line."""
    from uma.cli.batch import print_answers

    with ready(chosen) as have:
        tokens = [
            chat_prompt(chosen, have.session.loaded.tokenizer, messages_of(chosen, prompt))
            for prompt in chosen.batch_prompts
        ]
        print_answers(chosen, have, tokens, settings_of(chosen, have))
    return 0
