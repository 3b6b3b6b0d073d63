"""Tokens per second of a prompt, and the time to the first token."""

from collections.abc import Sequence

from uma.architecture.layers import Architecture
from uma.memory.reads import WeightReads
from uma.speed.fitted import seconds, term_units
from uma.speed.links import Link, over
from uma.speed.processor import Processor
from uma.speed.rate import Calibration, NotKnown, Rate, Split, fit_of, rate
from uma.speed.work import Work, prompt_work
from uma.workload import Engine

# Tokens of one pass: mlx-lm 0.32.2, generate.py, DEFAULT_PREFILL_STEP_SIZE; llama.cpp b11434,
# common/common.h, n_ubatch; vLLM and transformers run a prompt in one, as far as is modelled here.
PASS_TOKENS = {"mlx": 2048, "llama.cpp": 512}


def prompt_tps(
    architecture: Architecture,
    reads: WeightReads,
    processors: Sequence[Processor],
    engine: Engine,
    prompt_tokens: int,
    *,
    cached_tokens: int = 0,
    batch_size: int = 1,
    pass_tokens: int | None = None,
    flash_attn: bool = True,
    quantized: bool = True,
    shares: Sequence[float] = (),
    pipelined: bool = True,
    split: Split = "layer",
    link: Link | None = None,
    calibration: Calibration | None = None,
) -> Rate | NotKnown:
    """Tokens per second of a prompt of ``prompt_tokens`` behind ``cached_tokens``.

    Args:
        pass_tokens (int, optional): ``--prefill-step-size`` or ``-ub``. Default: the engine's.
        quantized (bool): Whether the weights are kept in fewer than 16 bits.
        shares (Sequence[float]): Of the layers, by device. Default: equal.
        split (Split): ``row`` lets the devices work at once, each on a part of every matrix.
        link (Link, optional): Between machines. Default: cards of one machine, as measured.
    """
    work = prompt_work(
        architecture,
        reads,
        engine,
        prompt_tokens,
        pass_tokens=pass_tokens or PASS_TOKENS.get(engine, prompt_tokens * batch_size),
        cached_tokens=cached_tokens,
        batch_size=batch_size,
        quantized=quantized,
        tile_tokens=processors[0].tile_tokens,
    )
    first = processors[0]

    def rate_over(link: Link | None) -> Rate | NotKnown:
        time = pipeline_seconds(
            engine,
            work,
            processors,
            shares,
            fused=flash_attn,
            pipelined=pipelined,
            split=split,
            link=link,
        )
        if isinstance(time, NotKnown):
            return time
        return rate(work.tokens, time, fit_of("prefill", engine, first), calibration, first.notes)

    return over(link, rate_over)


def pipeline_seconds(
    engine: str,
    work: Work,
    processors: Sequence[Processor],
    shares: Sequence[float] = (),
    *,
    fused: bool,
    pipelined: bool = True,
    split: Split = "layer",
    link: Link | None = None,
) -> float | NotKnown:
    """The time of all passes, each device with its layers, or with its part of every matrix.

    Passes follow each other through the devices (llama.cpp since pull request 6017): the slowest
    device works all the time, the others before the first pass and after the last.
    """
    count = len(processors)
    times: list[float] = []
    lost = 0.0
    for processor, part in zip(processors, shares or [1 / count] * count, strict=True):
        fit = fit_of("prefill", engine, processor)
        if isinstance(fit, NotKnown):
            return fit
        units = term_units("prefill", work.part(part), processor, fused=fused)
        times.append(seconds(fit, units))
        lost = fit.terms.get("pipeline", 0.0)
    one_after_another = sum(times)
    if link is not None:  # mlx-lm ends each pass with a message to all: no pass overtakes another
        if split == "row":
            return max(times) + work.passes * link.tensor_s(work.hidden_bytes, count, work.layers)
        return one_after_another + work.passes * link.pipeline_s(work.hidden_bytes, count)
    if not pipelined:
        return one_after_another
    at_once = max(times) * (1 - 1 / work.passes) + one_after_another / work.passes
    return at_once + lost * (one_after_another - at_once)


def time_to_first_token_s(
    prompt: Rate | NotKnown, decode: Rate | NotKnown, prompt_tokens: int
) -> Rate | NotKnown:
    """Seconds until the first token, in a ``Rate``'s fields: the prompt, then one step.

    Without loading; ``low`` is the quickest.
    """
    if isinstance(prompt, NotKnown):
        return prompt
    if isinstance(decode, NotKnown):
        return decode

    def after(prompt_tps: float, decode_tps: float) -> float:
        return prompt_tokens / prompt_tps + 1 / decode_tps

    return Rate(
        after(prompt.high, decode.high),
        after(prompt.best, decode.best),
        after(prompt.low, decode.low),
        prompt.basis,
        prompt.source,
    )
