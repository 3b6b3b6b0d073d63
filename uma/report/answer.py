"""One answer, or many, in a line of text: speeds, why it was cut, what the caches held."""

from typing import TYPE_CHECKING, Any

from uma.units import format_gib

if TYPE_CHECKING:
    from uma.measurement.generation import Stats


def speed_text(stats: "Stats", load_s: float | None = None) -> str:
    """Tokens and rates of one answer."""
    rate = "" if stats.generation_tps is None else f" at {stats.generation_tps:,.1f} tokens/s"
    reused = f" ({stats.reused_tokens:,} reused)" if stats.reused_tokens else ""
    loaded = "" if load_s is None else f"loaded in {load_s:.1f} s, "
    prompt = f"prompt {stats.prompt_tokens:,} tokens{reused} at {stats.prompt_tps:,.1f} tokens/s"
    return f"{loaded}{prompt}, answer {stats.generation_tokens:,} tokens{rate}"


def cut_text(
    stats: "Stats", max_tokens: int | None, context_tokens: int, longer_context: int | None
) -> str | None:
    """Why an answer is cut, or ``None``; ``longer_context`` is one that fits, if any does."""
    if stats.finish_reason == "length":
        return f"cut after {max_tokens:,} tokens (--max-tokens)"
    if stats.finish_reason == "context":
        longer = "no longer one fits"
        if longer_context is not None:
            longer = f"--context {longer_context} would fit"
        return f"cut: the context of {context_tokens:,} tokens is full; {longer}"
    return None


def process_text(memory: dict[str, Any]) -> str:
    """Memory of the process that ran the model: a ``ProcessMemory`` as a dictionary."""
    highest = memory["peak_bytes"]
    peak = "" if highest is None else f", peak {format_gib(highest)}"
    now = format_gib(memory["current_bytes"])
    return f"process: {memory['kind']} {now}{peak} ({memory['source']})"


def held_text(held_bytes: int, used_bytes: int, paged_bytes: int) -> str:
    """Bytes that contiguous caches held against those in use, and what a paged cache would hold."""
    share = 100 * used_bytes / held_bytes if held_bytes else 100.0
    return (
        f"caches held {format_gib(held_bytes)} at most, {share:.0f} % of it used; "
        f"in pages of 16 tokens the same would take {format_gib(paged_bytes)}"
    )
