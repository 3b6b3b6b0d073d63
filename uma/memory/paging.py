"""PagedAttention against contiguous reservation: slots held for requests of given lengths.

A server runs ``n`` sequences at once; each takes the next request when its last one ends. A slot
is room for one token's keys and values. Contiguous reservation holds ``max_model_len`` slots for a
sequence from its first token; paged holds whole blocks of what it has come to (vLLM 0.33.0,
``v1/core/kv_cache_manager.py``), so only the last block has room to spare.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from uma.errors import UsageError

BLOCK_SIZE = 16  # vLLM 0.33.0, config/cache.py, DEFAULT_BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and what is generated from it; ``weight`` says how often it comes."""

    prompt_tokens: int
    generation_tokens: int
    weight: int = 1


@dataclass(frozen=True, slots=True)
class Holding:
    """Mean slots of one running sequence: used by tokens, held in blocks, held contiguously."""

    used_slots: Fraction
    paged_slots: Fraction
    contiguous_slots: Fraction

    @property
    def paged_waste(self) -> float:
        """Share of the paged slots that hold no token."""
        return float(1 - self.used_slots / self.paged_slots)

    @property
    def contiguous_waste(self) -> float:
        """Share of the contiguous slots that hold no token."""
        return float(1 - self.used_slots / self.contiguous_slots)

    def paged_bytes(self, slot_bytes: int, sequences: int = 1) -> int:
        """Mean bytes of ``sequences`` running ones with ``slot_bytes`` a slot, rounded up."""
        return -(-self.paged_slots * slot_bytes * sequences // 1)

    def contiguous_bytes(self, slot_bytes: int, sequences: int = 1) -> int:
        """Bytes that ``sequences`` running ones reserve."""
        return -(-self.contiguous_slots * slot_bytes * sequences // 1)


def parse_requests(text: str) -> tuple[Request, ...]:
    """Requests as ``PROMPT+ANSWER`` in tokens, each with how often it comes, between commas.

    Raises:
        UsageError: If it is not written so.

    >>> parse_requests("512+128x9,4096+512")[0]
    Request(prompt_tokens=512, generation_tokens=128, weight=9)
    """
    matches = [re.fullmatch(r"(\d+)\+(\d+)(?:x(\d+))?", one.strip()) for one in text.split(",")]
    if not all(matches):
        raise UsageError(f"{text!r} lists no requests; write them as 512+128x9,4096+512")
    return tuple(Request(int(m[1]), int(m[2]), int(m[3] or 1)) for m in matches if m)


def blocks(tokens: int, block_size: int = BLOCK_SIZE) -> int:
    """Blocks that ``tokens`` take.

    >>> blocks(16), blocks(17)
    (1, 2)
    """
    return -(-tokens // block_size)


def mean_holding(
    requests: Sequence[Request], max_model_len: int, block_size: int = BLOCK_SIZE
) -> Holding:
    """Mean over time of what a sequence holds, in closed form.

    A request is seen once for every token that it generates, so long generations count more: the
    mean is the sum over all steps of all requests by the number of those steps.

    Raises:
        UsageError: If there is no request, one generates nothing, or one is too long.
    """
    _check(requests, max_model_len, block_size)
    steps = used = paged = 0
    for request in requests:
        first, last = request.prompt_tokens, request.prompt_tokens + request.generation_tokens
        steps += request.weight * request.generation_tokens
        used += request.weight * (_sum_to(last) - _sum_to(first))
        held = _blocks_to(last, block_size) - _blocks_to(first, block_size)
        paged += request.weight * block_size * held
    return Holding(Fraction(used, steps), Fraction(paged, steps), Fraction(max_model_len))


def _check(requests: Sequence[Request], max_model_len: int, block_size: int) -> None:
    if not requests or block_size < 1:
        raise UsageError("paging needs at least one request and blocks of at least one token")
    for request in requests:
        if request.generation_tokens < 1 or request.prompt_tokens < 0 or request.weight < 1:
            raise UsageError(f"{_words(request)} must generate a token and come at least once")
        if request.prompt_tokens + request.generation_tokens > max_model_len:
            raise UsageError(f"{_words(request)} is longer than max_model_len {max_model_len:,}")


def _words(request: Request) -> str:
    """A request as ``parse_requests`` reads it."""
    return f"{request.prompt_tokens}+{request.generation_tokens}x{request.weight}"


def _sum_to(tokens: int) -> int:
    """1 + 2 + ... + tokens."""
    return tokens * (tokens + 1) // 2


def _blocks_to(tokens: int, block_size: int) -> int:
    """Blocks of 1, of 2, ... and of ``tokens`` tokens, summed."""
    full, rest = divmod(tokens, block_size)
    return block_size * _sum_to(full) + rest * (full + 1)
