"""One way to run a model on one machine: what it takes where, whether that fits, how fast it is."""

from collections.abc import Callable
from typing import Literal

from uma.frozen import dataclass
from uma.ledger import Verdict
from uma.speed.rate import NotKnown, Rate
from uma.units import format_gib
from uma.workload import Engine

Technique = Literal[
    "resident",
    "raised wired limit",
    "streamed from the SSD",
    "split by layers",
    "tensor parallel",
    "layers on the host",
    "experts on the host",
    "streamed over the link",
]

NO_ROOM = NotKnown("it does not fit")


def no_prompt() -> NotKnown:
    return NO_ROOM


@dataclass(frozen=True, slots=True)
class Plan:
    """``device_bytes`` are held where the model runs, of ``budget_bytes``; ``host_bytes`` beside.

    On a machine of one memory there is nothing beside: ``host_bytes`` is 0. ``disk_bytes`` are
    read from a disk while it runs. ``decode`` is of all ``sequences`` together. ``options`` are
    those of the engine that make it this plan. Where memory is not enough ``short_bytes`` says how
    much is missing, in ``short_of``. ``prompt_of`` computes what few plans are asked for.
    """

    technique: Technique
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

    @property
    def runs(self) -> bool:
        return self.verdict in ("fits", "tight")

    @property
    def prompt(self) -> Rate | NotKnown:
        """Tokens per second of one prompt."""
        return self.prompt_of()

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
            speed = "" if self.decode_tps is None else f", and {self.decode_tps:.2g} tokens/s"
            return f"{format_gib(self.short_bytes)} too much for {self.short_of}{speed}"
        tps = self.decode_tps
        if tps is None or tps >= min_tps:
            return None
        return f"{tps:.1f} tokens/s, {min_tps - tps:.1f} below {min_tps:g}"
