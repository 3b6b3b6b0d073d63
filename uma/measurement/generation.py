"""What the generation of one answer showed."""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "context"]


@dataclass(frozen=True, slots=True)
class Stats:
    """What one answer took. ``reused_tokens`` of the prompt were in the cache before.

    ``prompt_tps`` is the tokens that were processed over the time to the first token, and
    ``generation_tps`` all generated tokens over the time after it, as in mlx-lm 0.32.2
    (``generate.py``, ``stream_generate``); ``None`` where only one token came.
    """

    prompt_tokens: int
    reused_tokens: int
    generation_tokens: int
    draft_tokens: int
    finish_reason: FinishReason
    ttft_s: float
    prompt_tps: float
    generation_tps: float | None
    prefill_cache_bytes: int
    cache_bytes: int
