"""Many prompts through mlx-lm's batch engine."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uma.cli.options import RunOptions
from uma.cli.outcome import keep, ledger_lines, run_json
from uma.cli.progress import progress, say
from uma.errors import UsageError

if TYPE_CHECKING:
    from uma.cli.session import Ready
    from uma.runtime.batch import BatchAnswer, BatchResult
    from uma.runtime.generate import Settings

BATCH_SIZE = 8  # mlx-lm 0.32.2, generate.py, BatchGenerator: prefill_batch_size


def of_file(chosen: RunOptions) -> RunOptions:
    """The options with the prompts of the file, which may be a pipe, and how many run at once.

    Raises:
        UsageError: If an option is given that a batch does not know, or the file has no prompts.
    """
    require_alone(chosen)
    prompts = read_prompts(chosen.prompts)
    return replace(chosen, batch_prompts=tuple(prompts), batch_size=min(BATCH_SIZE, len(prompts)))


def read_prompts(path: Path | None) -> list[str]:
    """The prompts of a file, one a line: plain text, a JSON string, or ``{"prompt": ...}``.

    Raises:
        UsageError: If the file cannot be read, or a line has no prompt.
    """
    assert path is not None
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompts {path}: {error}") from None
    prompts = [_prompt(line, f"{path}:{n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise UsageError(f"--prompts {path}: no prompts; write one on each line")
    return prompts


def _prompt(line: str, place: str) -> str:
    if not line.lstrip().startswith(("{", '"')):
        return line
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{place}: not JSON: {error}") from None
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(prompt, str) or not prompt.strip():
        raise UsageError(f'{place}: no prompt; write a text, or an object with "prompt"')
    return prompt


def require_alone(chosen: RunOptions) -> None:
    """Refuse what the batch engine does not do.

    Raises:
        UsageError: If a prompt or an option stands beside ``--prompts`` that it would ignore.
    """
    beside = {
        "a prompt": chosen.prompt,
        "--draft-model": chosen.draft_model,
        "--prompt-cache": chosen.prompt_cache,
        "--kv-bits": chosen.kv_bits,
    }
    given = [name for name, value in beside.items() if value is not None]
    if given:
        raise UsageError(f"--prompts does not go with {', '.join(given)}; leave one of them out")


def print_answers(
    chosen: RunOptions, have: "Ready", tokens: list[list[int]], settings: "Settings"
) -> None:
    """Answer all prompts; answers to stdout in the order of the prompts, bytes to stderr."""
    from uma.report.answer import held_text
    from uma.runtime.session import batch_ledger

    result = _answered(chosen, have, tokens, settings)
    ledger = batch_ledger(have.session, result)
    answers = [_answer_json(chosen, answer) for answer in result.answers]
    report = _numbers(result) | run_json(have, settings, ledger)
    if chosen.json:
        print(json.dumps({"answers": answers} | report, indent=2))
    else:
        for answer in answers:
            print(json.dumps(answer))
        held = held_text(result.held_bytes, result.used_bytes, result.paged_bytes)
        rates = (
            f"prompts at {result.prompt_tps:,.1f} tokens/s, "
            f"answers at {result.generation_tps:,.1f} tokens/s"
        )
        say("\n".join([*ledger_lines(have, ledger, report), held, rates]), chosen.quiet)
    keep(chosen, have, report)


def _answered(
    chosen: RunOptions, have: "Ready", tokens: list[list[int]], settings: "Settings"
) -> "BatchResult":
    from uma.runtime.session import answer_all

    done = 0
    with progress("answered", quiet=chosen.quiet) as show:

        def on_answer(*_: object) -> None:
            nonlocal done
            done += 1
            show(done, len(tokens))

        return answer_all(have.session, tokens, settings, on_answer)


def _answer_json(chosen: RunOptions, answer: "BatchAnswer") -> dict[str, Any]:
    found = asdict(answer)
    del found["tokens"]
    if chosen.thinking == "hide":
        found["thinking"] = ""
    return found


def _numbers(result: "BatchResult") -> dict[str, Any]:
    """Totals of all answers, bytes of their caches, rates of all sequences together."""
    return {
        "prompt_tokens": sum(a.prompt_tokens for a in result.answers),
        "generation_tokens": sum(a.generation_tokens for a in result.answers),
        "prompt_tps": result.prompt_tps,
        "generation_tps": result.generation_tps,
        "held_bytes": result.held_bytes,
        "used_bytes": result.used_bytes,
        "paged_bytes": result.paged_bytes,
    }
