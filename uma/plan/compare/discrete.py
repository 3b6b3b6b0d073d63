"""Plans on cards with memory of their own, and a host behind a link.

Two mechanisms run what a card does not hold. llama.cpp computes layers, or experts, on the host,
at the speed of the host's memory; accelerate copies the weights of a layer to the card before it
runs, in every step, at the speed of the link.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any

from uma.ledger import Verdict
from uma.machine import Machine, verdict
from uma.memory.reads import WeightReads
from uma.plan.compare.candidates import Candidate
from uma.plan.compare.placed import placed
from uma.plan.compare.plans import NO_ROOM, Plan, Technique, no_prompt
from uma.plan.compare.subject import Subject
from uma.plan.engine_case import EngineCase
from uma.plan.layer_offload import LayerOffload
from uma.speed.decode import Host, Streamed, decode_tps
from uma.speed.prefill import PASS_TOKENS, prompt_tps
from uma.speed.processor import Processor, host_processor, processors_of
from uma.speed.rate import NotKnown, Rate
from uma.units import format_gib

NO_LLAMA_CPP = "Gaudi"  # which has no backend for it (llama.cpp b11434, ggml/src)
MOST_DEVICES = 16  # llama.cpp b11434, src/llama.cpp, llama_max_devices


def llama_cpp_plans(subject: Subject, candidate: Candidate, bits: int) -> Iterator[Plan]:
    """All on the cards; else experts on the host, or layers."""
    devices = candidate.machine.devices
    case = subject.other("llama.cpp", bits, candidate.machine)
    if case is None or len(devices) > MOST_DEVICES:
        return
    if any(device.name.startswith(NO_LLAMA_CPP) for device in devices):
        return
    resident = _resident(subject, case)
    yield resident
    if not resident.runs:
        yield from _offloaded(subject, candidate, case)


def _resident(subject: Subject, case: EngineCase) -> Plan:
    machine, needed = case.machine, subject.needed_bytes(case)
    several = len(machine.devices) > 1
    technique: Technique = "split by layers" if several else "resident"
    shares = layer_shares(subject, case) if several else [1.0]
    found, of = verdict(needed, case.budget), "the card"
    short = needed - case.budget.ceiling_bytes
    if several:
        of = f"{len(machine.devices)} cards"
        crowded = _crowded_bytes(subject, case, shares, case.budget.ceiling_bytes)
        if found != "exceeds" and crowded > 0:
            found, short, of = "exceeds", crowded, "the fullest of cards that hold together"
        elif found == "fits":
            crowded = _crowded_bytes(subject, case, shares, case.budget.budget_bytes)
            found = "tight" if crowded > 0 else "fits"
    options = ("-ngl", "999")
    if found == "exceeds":
        return _plan(
            subject,
            case,
            technique,
            needed,
            verdict=found,
            options=options,
            short_bytes=short,
            short_of=f"{of}, {format_gib(case.budget.ceiling_bytes)}",
        )
    reads, processors = subject.reads(case), processors_of(machine)
    return _plan(
        subject,
        case,
        technique,
        needed,
        verdict=found,
        options=options,
        decode=_decode(subject, case, reads, processors, shares),
        prompt_of=lambda: _prompt(subject, case, reads, processors, shares),
    )


def layer_shares(subject: Subject, case: EngineCase) -> list[float]:
    """The part of the layers that llama.cpp puts on each card: by their memory, the head last.

    llama.cpp b11434, ``src/llama-model.cpp``, ``load_tensors``: a layer goes to the first card
    whose cumulated part of the free memory is above the layer's place among them and the head.
    """
    devices = case.machine.devices
    total = sum(device.memory_bytes for device in devices)
    ends = tuple(end / total for end in accumulate(device.memory_bytes for device in devices))
    return subject.once(("shares", ends), lambda: _shares(len(subject.architecture.layers), ends))


def _shares(count: int, ends: tuple[float, ...]) -> list[float]:
    counts = [0] * len(ends)
    for place in range(count):
        counts[next(i for i, end in enumerate(ends) if place / (count + 1) < end)] += 1
    return [number / count for number in counts]


def _crowded_bytes(
    subject: Subject, case: EngineCase, shares: list[float], limit_bytes: int
) -> int:
    """What the fullest card holds above its part of ``limit_bytes``; at most 0 if none does.

    A card holds its layers with their caches and a buffer of computation, the last one the head
    too. Each has its process's context, of which those of all but one are off the limit already.
    """
    devices, layers = case.machine.devices, subject.layer_bytes(case)
    terms = {term.name: term.size_bytes for term in subject.terms(case)}
    context, computed = terms["runtime_context"], terms.get("activations", 0)
    head = subject.needed_bytes(case) - sum(layers) - context - computed
    total = sum(device.memory_bytes for device in devices)
    start, most = 0, -limit_bytes
    for index, (device, share) in enumerate(zip(devices, shares, strict=True)):
        end = start + round(share * len(layers))
        held = sum(layers[start:end]) + computed // len(devices)
        held += head if index == len(devices) - 1 else 0
        most = max(most, held - (limit_bytes - context) * device.memory_bytes // total)
        start = end
    return most


def _offloaded(subject: Subject, candidate: Candidate, case: EngineCase) -> Iterator[Plan]:
    machine, room = case.machine, case.machine.host_room_bytes
    needed = subject.needed_bytes(case)
    short = needed - case.budget.budget_bytes - room
    ways = [] if short > 0 else subject.offloads(case)
    for way in ways:
        if way.device_bytes <= case.budget.budget_bytes and way.host_bytes <= room:
            yield _offload_plan(subject, candidate, case, way)
            return
    where = f"the cards and {format_gib(room)} of the host's memory"
    if machine.host_memory_bytes is None:
        where = "the cards: the host's memory is not known (--host-ram)"
    least = min((way.host_bytes - room for way in ways), default=short)
    yield _plan(
        subject,
        case,
        "layers on the host",
        needed,
        verdict="exceeds",
        short_bytes=max(short, least, 0),
        short_of=where,
    )


def _offload_plan(
    subject: Subject, candidate: Candidate, case: EngineCase, way: LayerOffload
) -> Plan:
    device, on_host = subject.split_reads(case.format, way)
    processor = host_processor(case.machine, candidate.host_bandwidth_bytes_per_s)
    host = Host(processor, on_host, way.layers, way.whole)
    processors = processors_of(case.machine)
    shares = layer_shares(subject, case) if len(processors) > 1 else [1.0]
    technique: Technique = "layers on the host" if way.whole else "experts on the host"

    def prompt() -> Rate | NotKnown:
        whole = _prompt(subject, case, subject.reads(case), processors, shares)
        return _copied(subject, case.machine, whole, on_host)

    return _plan(
        subject,
        case,
        technique,
        way.device_bytes,
        options=way.options,
        host_bytes=way.host_bytes,
        decode=_decode(subject, case, device, processors, shares, host),
        prompt_of=prompt,
        notes=(f"{way.text} on the host",),
    )


def _copied(
    subject: Subject, machine: Machine, prompt: Rate | NotKnown, host: WeightReads
) -> Rate | NotKnown:
    """A prompt whose host weights are copied to the card in each pass (``op_offload``)."""
    if isinstance(prompt, NotKnown):
        return prompt
    if machine.link_bytes_per_s is None:
        return NotKnown("the link between host and card is not known")
    tokens = subject.tokens
    size = min(tokens, PASS_TOKENS["llama.cpp"])
    copied_s = -(-tokens // size) * host.size_bytes(size) / machine.link_bytes_per_s

    def beside(rate: float) -> float:
        return tokens / (tokens / rate + copied_s)

    return replace(
        prompt, low=beside(prompt.low), best=beside(prompt.best), high=beside(prompt.high)
    )


def accelerate_plan(subject: Subject, candidate: Candidate, bits: int = 16) -> Plan | None:
    """Weights of layers that have no room are copied over the link in every step.

    A layer is copied whole, all its experts included (accelerate 1.15, ``hooks.py``,
    ``AlignDevicesHook``). The first card keeps room for the largest one (``utils/modeling.py``,
    ``infer_auto_device_map``). In 8 and 4 bits what is on the host stays in 16: bitsandbytes
    converts on cards alone. Several cards run their layers one after the other.
    """
    machine = candidate.machine
    case = subject.other("transformers", bits, machine)
    if case is None or machine.link_bytes_per_s is None:
        return None
    found = placed(subject, case)
    host, disk = found.weights_on("cpu"), found.weights_on("disk")
    technique: Technique = "split by layers" if len(machine.devices) > 1 else "resident"
    device = found.beside_bytes + found.cards_bytes
    if host or disk:
        technique = "streamed over the link"
        device += found.largest_bytes
    room = 0 if candidate.host is None else candidate.host.disk_bytes or 0
    short, of = (disk - room, "the host's memory") if disk else (0, "")
    if room and disk:
        of = "the host's memory and its disk"
    if not found.cards_bytes:
        short, of = found.least_short_bytes, "the cards, which hold no layer of it"
    if short > 0:
        plan = _plan(
            subject,
            case,
            technique,
            device,
            verdict="exceeds",
            host_bytes=host + disk,
            short_bytes=short,
            short_of=of,
        )
        return replace(plan, bits=bits)
    notes = ["at the link's full rate, which copies of pageable memory do not reach"]
    if disk:
        notes.append(f"{format_gib(disk)} are read from the disk in every step")
    plan = _plan(
        subject,
        case,
        technique,
        device,
        host_bytes=host,
        decode=_streamed(subject, case, candidate, host, disk),
        prompt_of=_no_figure,
        notes=tuple(notes) if host or disk else (),
    )
    return replace(plan, bits=bits, disk_bytes=disk)


def _streamed(
    subject: Subject, case: EngineCase, candidate: Candidate, host: int, disk: int
) -> Rate | NotKnown:
    """The speed where so many bytes cross the link in every step, after the disk was read."""
    link, rate = case.machine.link_bytes_per_s, None
    assert link is not None
    if candidate.host is not None:
        rate = candidate.host.disk_bytes_per_s
    if disk and rate is None:
        return NotKnown("how fast the host's disk reads is not known (--disk-bandwidth)")
    moved = host + disk
    step_s = moved / link + (disk / rate if rate else 0)
    return decode_tps(
        subject.architecture,
        subject.reads(case),
        processors_of(case.machine),
        "transformers",
        subject.tokens,
        batch_size=subject.workload.batch_size,
        streamed=Streamed(moved, moved / step_s if moved else link),
    )


def _no_figure() -> NotKnown:
    return NotKnown("no public measurements of prompts with transformers")


def _decode(
    subject: Subject,
    case: EngineCase,
    reads: WeightReads,
    processors: tuple[Processor, ...],
    shares: list[float],
    host: Host | None = None,
) -> Rate | NotKnown:
    return decode_tps(
        subject.architecture,
        reads,
        processors,
        case.engine,
        subject.tokens,
        batch_size=subject.workload.batch_size,
        shares=shares,
        host=host,
        kv_bits=subject.cache_bits(case.engine),
    )


def _prompt(
    subject: Subject,
    case: EngineCase,
    reads: WeightReads,
    processors: tuple[Processor, ...],
    shares: list[float],
) -> Rate | NotKnown:
    return prompt_tps(
        subject.architecture,
        reads,
        processors,
        case.engine,
        subject.tokens,
        shares=shares,
        quantized=case.bits < 16,
    )


def _plan(
    subject: Subject,
    case: EngineCase,
    technique: Technique,
    device_bytes: int,
    *,
    verdict: Verdict = "fits",
    host_bytes: int = 0,
    decode: Rate | NotKnown = NO_ROOM,
    prompt_of: Callable[[], Rate | NotKnown] = no_prompt,
    **more: Any,
) -> Plan:
    return Plan(
        technique=technique,
        engine=case.engine,
        format=case.format,
        bits=subject.width(case.bits),
        bits_per_weight=8 * case.weights.size_bytes / case.architecture.num_parameters,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        disk_bytes=0,
        budget_bytes=case.budget.budget_bytes,
        verdict=verdict,
        decode=decode,
        prompt_of=prompt_of,
        sequences=case.workload.batch_size,
        cache_bytes=subject.cache_bytes(case),
        **more,
    )
