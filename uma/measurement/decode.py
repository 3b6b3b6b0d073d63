"""What decode itself reaches: the bytes that a token reads, times tokens per second."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from uma.memory.reads import read_share

if TYPE_CHECKING:
    from uma.plan.inference import InferencePlan

LEAST_TOKENS = 16  # fewer are mostly start-up


@dataclass(frozen=True, slots=True)
class DecodeRate:
    """One recorded run: ``read_bytes`` are the weights and caches that each token reads."""

    model: str
    date: str
    form: str
    read_bytes: int
    tokens_per_s: float
    generation_tokens: int

    @property
    def bytes_per_s(self) -> float:
        return self.read_bytes * self.tokens_per_s


def decode_read_bytes(plan: "InferencePlan", cache_bytes: int) -> int:
    """What each token of one sequence reads: its part of the weights, and the caches."""
    return round(read_share(plan.architecture) * plan.form.weights.size_bytes) + cache_bytes


def last_decode(records: Sequence[Mapping[str, Any]]) -> DecodeRate | None:
    """The newest of ``records`` (oldest first) with one sequence, no drafts, 16 tokens or more."""
    for record in reversed(records):
        rate = _rate(record)
        if rate is not None:
            return rate
    return None


def _rate(record: Mapping[str, Any]) -> DecodeRate | None:
    speeds, settings = record.get("speeds") or {}, record.get("settings") or {}
    read, rate = speeds.get("decode_read_bytes"), speeds.get("generation_tps")
    tokens = speeds.get("generation_tokens") or 0
    alone = settings.get("batch_size") == 1 and not speeds.get("draft_tokens")
    if not read or not rate or not alone or tokens < LEAST_TOKENS:
        return None
    return DecodeRate(
        model=str((record.get("model") or {}).get("name")),
        date=str(record.get("time"))[:10],
        form=str(settings.get("form")),
        read_bytes=read,
        tokens_per_s=rate,
        generation_tokens=tokens,
    )
