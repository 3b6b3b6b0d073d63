"""Tokens per second while a text is generated, on one processor or on several."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log2

from uma.architecture.layers import Architecture
from uma.errors import UsageError
from uma.memory.reads import WeightReads
from uma.speed.fitted import seconds, term_units
from uma.speed.processor import Processor
from uma.speed.rate import Calibration, NotKnown, Rate, Split, fit_of, rate
from uma.speed.work import Work, decode_work
from uma.workload import Engine


@dataclass(frozen=True, slots=True)
class Host:
    """What the CPU's cores do: weights that are not on the devices, of ``layers`` layers.

    ``whole`` layers have their attention and cache there too (``-ngl``); otherwise only their
    experts are there (``-ncmoe``).
    """

    processor: Processor
    reads: WeightReads
    layers: int
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Streamed:
    """Weights that do not stay on a device: of each step, these bytes over a link or from a disk.

    They are added to the time of the step: accelerate's hooks copy a layer, then run it
    (accelerate 1.15, ``hooks.py``, ``AlignDevicesHook.pre_forward``).
    """

    size_bytes: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Link:
    """What joins machines: the time of a message without content, and its rate."""

    latency_s: float
    bytes_per_s: float

    def message_s(self, size_bytes: float) -> float:
        return self.latency_s + size_bytes / self.bytes_per_s


# Two Macs over Thunderbolt 5: MLX's JACCL (RDMA, macOS 26.2) as measured between an M3 Ultra and an
# M5 Max, 27 to 31 us and 6.1 to 6.5 GB/s (github.com/jundot/omlx/pull/3118); the ring over TCP with
# half of 0.38 to 0.95 ms (github.com/exo-explore/exo/issues/2295), 3 GB/s
# (github.com/ml-explore/mlx-lm/pull/1905, over USB4).
JACCL = Link(29e-6, 6.3e9)
RING = Link(0.33e-3, 3e9)
ALL_REDUCES = 2  # of a layer whose matrices are split: after attention, after the feed-forward part


def decode_tps(
    architecture: Architecture,
    reads: WeightReads,
    processors: Sequence[Processor],
    engine: Engine,
    context_tokens: float,
    *,
    batch_size: int = 1,
    tokens_each: int = 1,
    flash_attn: bool = True,
    kv_bits: float = 16,
    split: Split = "layer",
    shares: Sequence[float] = (),
    host: Host | None = None,
    streamed: Streamed | None = None,
    link: Link | None = None,
    calibration: Calibration | None = None,
) -> Rate | NotKnown:
    """Tokens per second of all ``batch_size`` sequences together, at ``context_tokens`` each.

    Args:
        reads (WeightReads): Of the weights on ``processors``, without those of ``host``.
        tokens_each (int): Tokens of one sequence in a step, where drafted ones are verified.
        flash_attn (bool): False for llama.cpp without it, where the scores are stored.
        split (Split): ``layer`` adds the times of the devices; ``row`` (``-sm row``, tensor
            parallelism) lets them work at once, and has them wait for each other in each layer.
        shares (Sequence[float]): Of the layers, by device. Default: equal.
        streamed (Streamed, optional): Weights that come over a link in every step.
        link (Link, optional): Between machines. Default: cards of one machine, as measured.
    """

    def work_of(read: WeightReads) -> Work:
        return decode_work(
            architecture,
            read,
            engine,
            context_tokens,
            batch_size=batch_size,
            tokens_each=tokens_each,
            kv_bits=kv_bits,
        )

    whole = len(architecture.layers)
    moved = host.layers / whole if host is not None and host.whole else 0.0
    work = work_of(reads).of_layers(1 - moved)
    sent = 2 * architecture.hidden_size * work.tokens
    message_s = None if link is None else link.message_s(sent)
    times = [device_seconds(engine, work, processors, split, shares, message_s, fused=flash_attn)]
    if host is not None:
        on_host = replace(work_of(host.reads).of_layers(moved), layers=host.layers)
        times.append(device_seconds(engine, on_host, [host.processor], fused=flash_attn))
    total = 0.0 if streamed is None else streamed.size_bytes / streamed.bytes_per_s
    for time in times:
        if isinstance(time, NotKnown):
            return time
        total += time
    slowest = processors[0] if host is None else host.processor
    tokens = batch_size * tokens_each
    return rate(tokens, total, fit_of("decode", engine, slowest), calibration, slowest.notes)


def device_seconds(
    engine: str,
    work: Work,
    processors: Sequence[Processor],
    split: Split = "layer",
    shares: Sequence[float] = (),
    message_s: float | None = None,
    *,
    fused: bool,
) -> float | NotKnown:
    """The time of one step on these processors, ``message_s`` from one to another."""
    count = len(processors)
    parts = shares or [1 / count] * count
    times: list[float] = []
    terms: Mapping[str, float] = {}
    for processor, part in zip(processors, parts, strict=True):
        fit = fit_of("decode", engine, processor)
        if isinstance(fit, NotKnown):
            return fit
        own = work.part(part)
        if split == "row":  # every layer has its kernels on every device
            own = replace(own, layers=work.layers, expert_layers=work.expert_layers)
        units = term_units("decode", own, processor, fused=fused, flops_per_byte=fit.flops_per_byte)
        times.append(seconds(fit, units))
        terms = fit.terms
    if split == "row":
        each = terms.get("shared_layers", 0.0) if message_s is None else ALL_REDUCES * message_s
        return max(times) + each * work.layers * log2(count)
    each = terms.get("boundary", 0.0) if message_s is None else message_s
    return sum(times) + each * (count - 1)


def speculative_tps(
    draft: Rate | NotKnown, verify: Rate | NotKnown, draft_tokens: int, tokens_per_round: float
) -> Rate | NotKnown:
    """Tokens per second where a small model drafts and the large one verifies.

    Args:
        draft (Rate): Of the small model, one token a step.
        verify (Rate): Of the large model with ``tokens_each`` of ``draft_tokens`` + 1.
        tokens_per_round (float): Accepted tokens and the one that the large model adds, on
            average: between 1 and ``draft_tokens`` + 1. It depends on both models and the text.

    Raises:
        UsageError: If no round can yield so many tokens.
    """
    if not 1 <= tokens_per_round <= draft_tokens + 1:
        raise UsageError(
            f"{tokens_per_round} tokens of a round with {draft_tokens} drafted: a round yields "
            f"1 to {draft_tokens + 1}"
        )
    if isinstance(draft, NotKnown):
        return draft
    if isinstance(verify, NotKnown):
        return verify

    def tps(draft_tps: float, verify_tps: float) -> float:
        return tokens_per_round / (draft_tokens / draft_tps + (draft_tokens + 1) / verify_tps)

    return replace(
        verify,
        low=tps(draft.low, verify.low),
        best=tps(draft.best, verify.best),
        high=tps(draft.high, verify.high),
    )
