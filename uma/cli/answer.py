"""One prompt, or many at once: the answer on stdout, the ledger on stderr."""

import json
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from uma.cli.plan import model_json
from uma.cli.progress import progress, say
from uma.cli.run import RunOptions
from uma.cli.session import Ready, ready, template_config
from uma.errors import UsageError

if TYPE_CHECKING:
    from uma.ledger import Ledger
    from uma.runtime.generate import Settings, Stats
    from uma.runtime.session import Measured


def run_prompt(chosen: RunOptions) -> int:
    """Answer one prompt."""
    prompt = prompt_text(chosen)
    with ready(chosen) as have:
        return _answer(chosen, have, prompt)


def prompt_text(chosen: RunOptions) -> str:
    """The prompt; from stdin where it is ``-`` or missing.

    Raises:
        UsageError: If it is empty.
    """
    text = chosen.prompt
    if text is None or text == "-":
        text = sys.stdin.read()
    if not text.strip():
        raise UsageError("the prompt is empty; give one with --prompt, or pipe it in")
    return text


def messages_of(chosen: RunOptions, prompt: str) -> list[dict[str, Any]]:
    system = [] if chosen.system is None else [{"role": "system", "content": chosen.system}]
    return [*system, {"role": "user", "content": prompt}]


def chat_prompt(chosen: RunOptions, have: Ready, messages: list[dict[str, Any]]) -> list[int]:
    from uma.runtime.template import chat_tokens

    return chat_tokens(
        have.session.loaded.tokenizer,
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


def _answer(chosen: RunOptions, have: Ready, prompt: str) -> int:
    from uma.runtime.prompt_file import load_prompt, save_prompt

    session = have.session
    tokens = chat_prompt(chosen, have, messages_of(chosen, prompt))
    settings = settings_of(chosen, have)
    if chosen.prompt_cache is not None and chosen.prompt_cache.exists():
        load_prompt(chosen.prompt_cache, session.cache, session.loaded)
    text, measured, interrupted = stream(chosen, have, tokens, settings)
    if chosen.prompt_cache is not None:
        save_prompt(chosen.prompt_cache, session.cache, session.loaded)
    finish(chosen, have, settings, measured, text)
    return 130 if interrupted else 0


def stream(
    chosen: RunOptions, have: Ready, tokens: list[int], settings: "Settings"
) -> "tuple[str, Measured, bool]":
    """Write the answer as it comes; its text, what was measured, whether Ctrl-C ended it."""
    from uma.runtime.measure import PhaseMeter
    from uma.runtime.session import Measured, answer

    measured = Measured(PhaseMeter())
    parts: list[str] = []
    interrupted = False
    with progress("reading the prompt", quiet=chosen.quiet) as show:
        try:
            for piece in answer(have.session, tokens, settings, measured, show):
                if piece.thinking and chosen.thinking == "hide":
                    continue
                parts.append(piece.text)
                if not chosen.json and piece.text:
                    print(piece.text, end="", flush=True)
        except KeyboardInterrupt:
            interrupted = True
    if not chosen.json:
        print(flush=True)
    return "".join(parts), measured, interrupted


def finish(
    chosen: RunOptions, have: Ready, settings: "Settings", measured: "Measured", text: str
) -> None:
    """Report and record one answer."""
    from uma.runtime.session import measured_ledger

    ledger = measured_ledger(have.session, measured)
    report = _report(have, settings, measured, ledger)
    if chosen.json:
        print(json.dumps({"text": text} | report, indent=2))
    elif not chosen.quiet:
        say(_summary(have, measured, ledger, settings))
    if chosen.record:
        note = record(have, report)
        if note is not None:
            say(f"note: {note}", chosen.quiet)


def _report(
    have: Ready, settings: "Settings", measured: "Measured", ledger: "Ledger"
) -> dict[str, Any]:
    from uma.report.plan import plan_json
    from uma.runtime.session import settings_record

    plan, stats = have.planned.plan, measured.stats
    document = plan_json(plan, model_json(have.planned.source)) | {"ledger": ledger.to_json()}
    document["settings"] |= settings_record(settings) | {"blas": have.blas}
    return _speeds(stats) | {"load_s": round(have.session.load_s, 3)} | document


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


def _summary(have: Ready, measured: "Measured", ledger: "Ledger", settings: "Settings") -> str:
    """The ledger of one answer, its speeds, and why it ended if not at its own end."""
    from uma.report.ledger import ledger_text

    lines = ["", ledger_text(ledger, have.planned.plan.budget.winner)]
    stats = measured.stats
    if stats is None:
        return "\n".join([*lines, "interrupted"])
    lines.append(speed_text(stats, have.session.load_s))
    cut = cut_text(stats, settings, have.planned.plan.workload.context_tokens)
    return "\n".join([*lines, *([cut] if cut else [])])


def speed_text(stats: "Stats", load_s: float | None = None) -> str:
    """Tokens and rates of one answer."""
    rate = "" if stats.generation_tps is None else f" at {stats.generation_tps:,.1f} tokens/s"
    reused = f" ({stats.reused_tokens:,} reused)" if stats.reused_tokens else ""
    loaded = "" if load_s is None else f"loaded in {load_s:.1f} s, "
    prompt = f"prompt {stats.prompt_tokens:,} tokens{reused} at {stats.prompt_tps:,.1f} tokens/s"
    return f"{loaded}{prompt}, answer {stats.generation_tokens:,} tokens{rate}"


def cut_text(stats: "Stats", settings: "Settings", context_tokens: int) -> str | None:
    """Why an answer is cut, or ``None``."""
    if stats.finish_reason == "length":
        return f"cut after {settings.max_tokens:,} tokens (--max-tokens)"
    if stats.finish_reason == "context":
        return f"cut: the context of {context_tokens:,} tokens is full (--context)"
    return None


def record(have: Ready, report: dict[str, Any]) -> str | None:
    """Keep one run on this machine; a note if that failed."""
    from uma.catalog import models
    from uma.paths import records_folder
    from uma.records import model_name, write_record
    from uma.runtime.versions import versions

    source = have.planned.source
    known = [model.hf_id.rsplit("/", 1)[-1] for model in models()]
    name = model_name(source.name, local=source.repo is None, known=known)
    speeds = {
        key: value for key, value in report.items() if key.endswith(("_tps", "_s", "_tokens"))
    }
    kept = {
        "command": "run",
        "model": report["model"] | {"name": name, "repo": None},
        "machine": report["machine"],
        "versions": versions(),
        "settings": report["settings"],
        "ledger": report["ledger"],
        "speeds": speeds,
    }
    return write_record(kept, records_folder()).note


def run_batch(chosen: RunOptions) -> int:
    """Answer the prompts of a file at once; each answer as a JSON line, or under its number."""
    from uma.cli.batch import print_answers, read_prompts

    prompts = read_prompts(chosen.prompts)
    with ready(chosen) as have:
        tokens = [chat_prompt(chosen, have, messages_of(chosen, prompt)) for prompt in prompts]
        print_answers(chosen, have, tokens, settings_of(chosen, have))
    return 0
