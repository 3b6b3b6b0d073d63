"""Tokens per second while a text is generated, on one processor or on several."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log2

from uma.architecture.layers import Architecture
from uma.errors import UsageError
from uma.memory.reads import WeightReads
from uma.speed.fitted import seconds, term_units
from uma.speed.links import Link, over
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
    beside = 0.0 if streamed is None else streamed.size_bytes / streamed.bytes_per_s
    if host is not None:
        on_host = replace(work_of(host.reads).of_layers(moved), layers=host.layers)
        time = device_seconds(engine, on_host, [host.processor], fused=flash_attn)
        if isinstance(time, NotKnown):
            return time
        beside += time
    slowest = processors[0] if host is None else host.processor

    def rate_over(link: Link | None) -> Rate | NotKnown:
        time = device_seconds(engine, work, processors, split, shares, fused=flash_attn, link=link)
        if isinstance(time, NotKnown):
            return time
        fit, tokens = fit_of("decode", engine, slowest), batch_size * tokens_each
        found = rate(tokens, beside + time, fit, calibration, slowest.notes)
        if slowest.reads_bytes_per_s is None or isinstance(found, NotKnown) or calibration:
            return found
        return replace(found, source=f"{found.source}, at the bandwidth measured on this machine")

    return over(link, rate_over)


def device_seconds(
    engine: str,
    work: Work,
    processors: Sequence[Processor],
    split: Split = "layer",
    shares: Sequence[float] = (),
    *,
    fused: bool,
    link: Link | None = None,
) -> float | NotKnown:
    """The time of one step on these processors, with what they send each other."""
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
        if processor.reads_bytes_per_s is not None:
            assert processor.bandwidth_bytes_per_s is not None
            reached = processor.bandwidth_bytes_per_s / processor.reads_bytes_per_s
            units["memory"] *= reached / fit.terms["memory"]
        times.append(seconds(fit, units))
        terms = fit.terms
    if split == "row":
        if link is not None:
            return max(times) + link.tensor_s(work.hidden_bytes, count, work.layers)
        return max(times) + terms.get("shared_layers", 0.0) * work.layers * log2(count)
    if link is not None:
        return sum(times) + link.pipeline_s(work.hidden_bytes, count)
    return sum(times) + terms.get("boundary", 0.0) * (count - 1)


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
