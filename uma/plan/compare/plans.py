"""One way to run a model on one machine: what it takes where, whether that fits, how fast it is."""

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from uma.frozen import dataclass
from uma.ledger import Verdict
from uma.speed.prefill import time_to_first_token_s
from uma.speed.rate import NotKnown, Rate
from uma.units import format_gib
from uma.workload import Engine

if TYPE_CHECKING:
    from uma.plan.compare.recipes import Recipe

Technique = Literal[
    "resident",
    "raised wired limit",
    "streamed from the SSD",
    "split by layers",
    "tensor parallel",
    "layers on the host",
    "experts on the host",
    "streamed over the link",
    "tensor parallel over Thunderbolt",
    "split by layers over Thunderbolt",
]

NO_ROOM = NotKnown("it does not fit")


@lru_cache(maxsize=4096)
def _known(prompt_of: Callable[[], Rate | NotKnown]) -> Rate | NotKnown:
    return prompt_of()


def no_prompt() -> NotKnown:
    return NO_ROOM


@dataclass(frozen=True, slots=True)
class Plan:
    """``device_bytes`` are held where the model runs, of ``budget_bytes``; ``host_bytes`` beside.

    On a machine of one memory there is nothing beside: ``host_bytes`` is 0. ``disk_bytes`` are
    read from a disk while it runs. ``decode`` is of all ``sequences`` together, which keep
    ``cache_bytes``; in training, where ``recipe`` says how, it is the tokens that are trained on.
    ``quality`` orders plans of the same ``bits``. ``options`` are those of the engine that make it
    this plan. Where memory is not enough ``short_bytes`` says how much is missing, in ``short_of``.
    ``prompt_of`` computes what few plans are asked for.
    """

    technique: str
    engine: Engine
    format: str
    bits: int
    bits_per_weight: float
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    budget_bytes: int
    verdict: Verdict
    decode: Rate | NotKnown
    prompt_of: Callable[[], Rate | NotKnown]
    options: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    short_bytes: int = 0
    short_of: str = ""
    sequences: int = 1
    cache_bytes: int | None = None
    quality: int = 0
    recipe: "Recipe | None" = None

    @property
    def runs(self) -> bool:
        return self.verdict in ("fits", "tight")

    @property
    def prompt(self) -> Rate | NotKnown:
        """Tokens per second of one prompt."""
        return _known(self.prompt_of)

    @property
    def decode_tps(self) -> float | None:
        """Tokens per second of each sequence."""
        return None if isinstance(self.decode, NotKnown) else self.decode.best / self.sequences

    @property
    def headroom_bytes(self) -> int:
        return self.budget_bytes - self.device_bytes

    def shortcoming(self, min_tps: float) -> str | None:
        """Why it is no answer, and by how much; ``None`` if it is one."""
        if not self.runs:
            tps = self.decode_tps
            speed = "" if tps is None else f", and {tps:{'.2g' if tps < 100 else ',.0f'}} tokens/s"
            return f"{format_gib(self.short_bytes)} too much for {self.short_of}{speed}"
        tps = self.decode_tps
        if tps is None or tps >= min_tps:
            return None
        return f"{tps:.1f} tokens/s, {min_tps - tps:.1f} below {min_tps:g}"


def first_token_s(plan: Plan, prompt_tokens: int) -> Rate | NotKnown:
    """Seconds to the first token; of requests that come at once, of the last of them."""
    decode, number = plan.decode, plan.sequences
    if isinstance(decode, Rate):  # of each sequence
        each = (decode.low / number, decode.best / number, decode.high / number)
        decode = Rate(*each, decode.basis, decode.source)
    return time_to_first_token_s(plan.prompt, decode, number * prompt_tokens)
