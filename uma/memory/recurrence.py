"""Chunks of tokens in which our own trainer runs recurrent layers: sizes that keep least."""

from math import isqrt

PAIRS_KEPT = 10  # arrays of all pairs of tokens of a chunk that a Mamba-2 layer keeps
STATES_KEPT = 6  # states of a token that the gated delta rule keeps
SHORTEST, LONGEST = 16, 256  # ssm.py, ssm_attn: step


def scan_chunk(length: int, state: int) -> int:
    """Tokens of a chunk of Mamba-2, ``state`` elements of a head's state.

    It keeps ``state * length / chunk`` elements of states and ``PAIRS_KEPT * chunk**2`` of pairs.

    >>> scan_chunk(2048, 64 * 128)
    64
    """
    return _power((length * state // (2 * PAIRS_KEPT)) ** (1 / 3))


def delta_chunk(length: int) -> int:
    """Tokens of a chunk of the gated delta rule: ``length / chunk`` states and ``6 * chunk``.

    >>> delta_chunk(2048)
    16
    """
    return _power(isqrt(length // STATES_KEPT))


def _power(tokens: float) -> int:
    return min(LONGEST, max(SHORTEST, 1 << (max(1, int(tokens)).bit_length() - 1)))
