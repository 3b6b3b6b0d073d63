"""The inverses of an estimate: the longest context, largest batch and best format that fit."""

from collections.abc import Callable
from dataclasses import replace

from uma.memory.kv_cache import STEP
from uma.plan.estimate import Asked, Change

LONGEST_CONTEXT_TOKENS = 1 << 20  # tried for models that state no maximum
LARGEST_BATCH = {
    "mlx": 1 << 14,
    "transformers": 1 << 14,
    "vllm": 1 << 14,
    "llama.cpp": 256,  # b11434, src/llama-cparams.h, LLAMA_MAX_SEQ
}


def largest_context(asked: Asked, limit_bytes: int | None = None) -> int | None:
    """The longest context within ``limit_bytes``, the budget by default; ``None`` for none.

    In whole steps of 256 tokens, at most the model's maximum.
    """
    limit = asked.budget.budget_bytes if limit_bytes is None else limit_bytes
    longest = asked.architecture.max_position_embeddings or LONGEST_CONTEXT_TOKENS

    def excess(tokens: int) -> int:
        tried = replace(asked.workload, context_tokens=tokens, prompt_tokens=None)
        return asked.excess_bytes(tried, limit)

    if excess(longest) <= 0:
        return longest
    steps = largest(lambda steps: excess(steps * STEP), longest // STEP)
    return None if steps is None else steps * STEP


def largest_batch(asked: Asked) -> int | None:
    """The most sequences of the asked context that fit the budget; ``None`` for not even one."""

    def excess(sequences: int) -> int:
        tried = replace(asked.workload, batch_size=sequences)
        return asked.excess_bytes(tried, asked.budget.budget_bytes)

    return largest(excess, LARGEST_BATCH[asked.engine])


def best_format(asked: Asked) -> str | None:
    """The widest usual format, in the engine's words, with which the workload fits."""
    for bits in asked.widths:
        tried = asked.changed(Change(bits=bits))
        if tried is not None and fits(tried):
            return tried.format
    return None


def fits(asked: Asked) -> bool:
    """Whether the workload is within the budget as it is asked."""
    return asked.excess_bytes(asked.workload, asked.budget.budget_bytes) <= 0


def largest(excess: Callable[[int], int], most: int) -> int | None:
    """The largest number from 1 to ``most`` without excess; ``None`` if 1 has some.

    ``excess`` must not fall. Where it is nearly a straight line, as memory is, the number on that
    line is right or next to it; doubling and halving are for the rest.

    >>> calls = []
    >>> largest(lambda n: calls.append(n) or 3 * n - 1000, 10**6), calls
    (333, [1, 2, 334, 333])
    """
    low, at_low = 1, excess(1)
    if at_low > 0 or most < 1:
        return None
    high, stride = min(2, most), 1
    while (at_high := excess(high) if high > low else at_low) <= 0:
        if high == most:
            return most
        slope = max(1, (at_high - at_low) // (high - low))
        low, at_low = high, at_high
        high = min(most, max(low + -at_low // slope + 1, low + stride))
        stride *= 2
    while high - low > 1:
        line = low + (high - low) * -at_low // (at_high - at_low)
        for turn in range(3):
            tried = (line, line + 1, (low + high) // 2)[turn]
            tried = min(max(tried, low + 1), high - 1)
            if high - low > 1:
                found = excess(tried)
                if found <= 0:
                    low, at_low = tried, found
                else:
                    high, at_high = tried, found
    return low
