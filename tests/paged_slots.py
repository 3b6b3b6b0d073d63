"""Slots of paged sequences counted step by step, for the tests of the closed form."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from uma.memory.paging import BLOCK_SIZE, Holding, Request, blocks


def simulated_holding(
    requests: Sequence[Request],
    max_model_len: int,
    block_size: int = BLOCK_SIZE,
    *,
    sequences: int = 16,
    steps: int = 20_000,
    seed: int = 0,
) -> Holding:
    """The mean of ``mean_holding``, counted on ``sequences`` that draw requests by weight."""
    draw = random.Random(seed)
    weights = [request.weight for request in requests]
    running = [_Running(*_drawn(draw, requests, weights)) for _ in range(sequences)]
    used = paged = 0
    for _ in range(steps):
        for index, sequence in enumerate(running):
            if sequence.left == 0:
                sequence = running[index] = _Running(*_drawn(draw, requests, weights))
            sequence.tokens += 1
            sequence.left -= 1
            if sequence.tokens > sequence.blocks * block_size:
                sequence.blocks = blocks(sequence.tokens, block_size)
            used += sequence.tokens
            paged += sequence.blocks * block_size
    counted = steps * sequences
    return Holding(Fraction(used, counted), Fraction(paged, counted), Fraction(max_model_len))


@dataclass(slots=True)
class _Running:
    tokens: int
    left: int
    blocks: int = 0


def _drawn(
    draw: random.Random, requests: Sequence[Request], weights: Sequence[int]
) -> tuple[int, int]:
    request = draw.choices(requests, weights)[0]
    return request.prompt_tokens, request.generation_tokens
