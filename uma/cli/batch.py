"""Many prompts through mlx-lm's batch engine."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from uma.cli.progress import progress, say
from uma.cli.run import RunOptions
from uma.errors import UsageError
from uma.units import format_gib

if TYPE_CHECKING:
    from uma.cli.session import Ready
    from uma.runtime.batch import BatchResult
    from uma.runtime.generate import Settings


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


def print_answers(
    chosen: RunOptions, have: "Ready", tokens: list[list[int]], settings: "Settings"
) -> None:
    """Answer all prompts; answers to stdout in the order of the prompts, bytes to stderr."""
    from uma.runtime.batch import batch

    done = 0
    with progress("answered", quiet=chosen.quiet) as show:

        def on_answer(*_: object) -> None:
            nonlocal done
            done += 1
            show(done, len(tokens))

        result = batch(
            have.session.loaded,
            tokens,
            context_tokens=have.planned.plan.workload.context_tokens,
            settings=settings,
            on_answer=on_answer,
        )
    if chosen.json:
        print(json.dumps(asdict(result), indent=2))
        return
    for answer in result.answers:
        print(json.dumps({"text": answer.text, "finish_reason": answer.finish_reason}))
    say(held_text(result), chosen.quiet)


def held_text(result: "BatchResult") -> str:
    """Bytes held against bytes used, and what a paged cache would hold."""
    share = 100 * result.used_bytes / result.held_bytes if result.held_bytes else 100.0
    return (
        f"caches held {format_gib(result.held_bytes)} at most, {share:.0f} % of it used; "
        f"in pages of 16 tokens the same would take {format_gib(result.paged_bytes)}. "
        f"prompt {result.prompt_tps:,.1f} tokens/s, answers {result.generation_tps:,.1f} tokens/s"
    )
