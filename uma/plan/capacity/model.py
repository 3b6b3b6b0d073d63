"""A chosen model on one machine, at every choice of the page: bits, cache, sequences, context."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from uma.architecture.layers import Architecture
from uma.checkpoint.source import ModelSource
from uma.engines.mlx_cache import kv_quantization
from uma.errors import UmaError
from uma.ledger import peak
from uma.memory.paging import BLOCK_SIZE, Holding, mean_holding
from uma.memory.paging import Request as Serving
from uma.memory.reads import WeightReads
from uma.memory.term import MemoryTerm
from uma.plan.capacity.facts import (
    NO_SPEED,
    Longest,
    ModelReport,
    Point,
    Sequences,
    Speed,
    binding_terms,
    speed,
)
from uma.plan.capacity.map import (
    Place,
    at_context,
    on,
    runs,
    scaled,
    verdicts_at,
    weights_of,
)
from uma.plan.compare.subject import CACHES, SCALE_BITS
from uma.plan.engine_case import EngineCase, engine_case
from uma.plan.estimate import Asked, Change, Estimate
from uma.plan.inference import Request
from uma.plan.inverses import largest_batch, largest_context
from uma.plan.mlx_case import MlxCase, mlx_case
from uma.speed.decode import decode_tps
from uma.speed.prefill import prompt_tps
from uma.speed.stored import even_reads
from uma.workload import Inference

CONTEXTS = (4096, 8192, 16_384, 32_768, 65_536, 131_072)
BATCHES = (1, 4, 16)
KV_BITS = (16, 8, 4)
SERVED_CONTEXTS = (8192, 32_768)
CACHE_TERMS = ("kv_cache", "recurrent_state")
LATEST = ("decode", "always")
_UNIT = 10**9


def model_report(
    source: ModelSource,
    architecture: Architecture,
    places: Sequence[Place],
    widths: Sequence[int],
) -> list[ModelReport]:
    """The model on each place, all of one engine, backend and kind.

    Where it cannot be had at all the reports have no points but the reason.
    """
    try:
        cases = list(_cases(source, architecture, places[0], widths))
    except UmaError as error:
        return [ModelReport(source.name, reason=str(error)) for _ in places]
    reads = even_reads(architecture, _UNIT)
    return [_on_place(source.name, architecture, cases, reads, place) for place in places]


def _cases(
    source: ModelSource, architecture: Architecture, place: Place, widths: Sequence[int]
) -> Iterator[tuple[int, Asked]]:
    """The model in each width with each cache; the width of the cache stands before it.

    Raises:
        UmaError: If the engine cannot run it.
    """
    first = _first(source, architecture, place)
    able = [bits for bits in widths if bits in first.widths] or [first.bits]
    for bits in able:
        asked = first.changed(Change(bits=bits))
        if asked is None:
            continue
        for kv_bits in KV_BITS:
            cached = _with_cache(asked, kv_bits)
            if cached is not None:
                yield kv_bits, cached


def _first(source: ModelSource, architecture: Architecture, place: Place) -> Asked:
    if place.engine == "mlx":
        request = Request(
            context_tokens=Inference().context_tokens,
            budget_bytes=place.own_budget_bytes,
            reserve_bytes=place.own_reserve_bytes,
        )
        return mlx_case(source, place.machine, request, architecture=architecture)
    file = source.gguf_headers[0] if source.gguf_headers else None
    return engine_case(
        architecture,
        place.engine,
        None,
        Inference(),
        place.budget,
        place.machine,
        model=source.name,
        file=file,
    )


def _with_cache(asked: Asked, kv_bits: int) -> Asked | None:
    """With a cache in so many bits; ``None`` where the engine or the model has none."""
    if kv_bits == 16:
        return asked
    if isinstance(asked, MlxCase):
        if not kv_quantization(asked.architecture, asked.request.kv_group_size).layers:
            return None
        return replace(asked, request=replace(asked.request, kv_bits=kv_bits))
    assert isinstance(asked, EngineCase)
    options = CACHES.get((asked.engine, kv_bits))
    if options is None:
        return None
    return replace(asked, settings=replace(asked.settings, **options))


def _on_place(
    name: str,
    architecture: Architecture,
    cases: Sequence[tuple[int, Asked]],
    reads: WeightReads,
    place: Place,
) -> ModelReport:
    most = architecture.max_position_embeddings
    contexts = [n for n in CONTEXTS if most is None or n <= most] or [most or CONTEXTS[0]]
    points: list[Point] = []
    longest: list[Longest] = []
    served: list[Sequences] = []
    notes: dict[str, None] = {}
    for kv_bits, asked in cases:
        here = on(asked, place)
        own = scaled(reads, weights_of(asked) / _UNIT)
        for point, estimate in _points(here, place, own, kv_bits, contexts):
            points.append(point)
            notes |= dict.fromkeys(estimate.notes)
        longest.append(
            Longest(
                asked.bits,
                kv_bits,
                largest_context(here),
                largest_context(here, here.budget.ceiling_bytes),
            )
        )
        if kv_bits == 16:
            served += [_sequences(here, place, own, n) for n in SERVED_CONTEXTS if n in contexts]
    return ModelReport(name, tuple(points), tuple(longest), tuple(served), tuple(notes))


def _points(
    asked: Asked, place: Place, reads: WeightReads, kv_bits: int, contexts: Sequence[int]
) -> Iterator[tuple[Point, Estimate]]:
    """Every number of sequences and context, up to the first context that no limit allows.

    What is longer needs more, and so do more sequences where not the shortest context runs.
    """
    for batch_size in BATCHES:
        for context in contexts:
            point, estimate = _point(asked, place, reads, kv_bits, batch_size, context)
            yield point, estimate
            if not runs(point.verdicts):
                break
        if context == contexts[0] and not runs(point.verdicts):
            return


def _asked_for(asked: Asked, batch_size: int, context: int) -> Asked:
    longer = at_context(asked, context)
    if isinstance(longer, MlxCase):
        return replace(longer, request=replace(longer.request, batch_size=batch_size))
    assert isinstance(longer, EngineCase)
    return replace(longer, workload=replace(longer.workload, batch_size=batch_size))


def _point(
    asked: Asked, place: Place, reads: WeightReads, kv_bits: int, batch_size: int, context: int
) -> tuple[Point, Estimate]:
    tried = _asked_for(asked, batch_size, context)
    found = tried.estimate()
    phase, terms = binding_terms(found.ledger.terms)
    verdicts = verdicts_at(tried, place, found.ledger.verdict)
    decode = prompt = NO_SPEED
    if runs(verdicts):
        decode = _decode(asked, place, reads, kv_bits, batch_size, context)
        prompt = _prompt(asked, place, reads, found, context)
    point = Point(
        bits=asked.bits,
        kv_bits=kv_bits,
        batch_size=batch_size,
        context_tokens=context,
        total_bytes=found.ledger.predicted_peak_bytes,
        headroom_bytes=found.headroom_bytes,
        verdict=found.ledger.verdict,
        verdicts=verdicts,
        phase=phase,
        terms=terms,
        decode=decode,
        prompt=prompt,
    )
    return point, found


def _decode(
    asked: Asked, place: Place, reads: WeightReads, kv_bits: int, batch_size: int, context: int
) -> Speed:
    """Tokens per second of each sequence."""
    scales = 0.0 if kv_bits == 16 else SCALE_BITS[asked.engine]
    found = decode_tps(
        asked.architecture,
        reads,
        place.processors,
        asked.engine,
        context,
        batch_size=batch_size,
        kv_bits=kv_bits + scales,
    )
    return speed(found, batch_size)


def _prompt(asked: Asked, place: Place, reads: WeightReads, found: Estimate, context: int) -> Speed:
    """Of a prompt as long as the context, one at a time."""
    passes = found.workload.prefill_step_size if asked.engine == "mlx" else None
    return speed(
        prompt_tps(
            asked.architecture,
            reads,
            place.processors,
            asked.engine,
            context,
            pass_tokens=passes,
            quantized=asked.bits < 16,
        )
    )


def _sequences(asked: Asked, place: Place, reads: WeightReads, context: int) -> Sequences:
    """How many sequences fit at once, and how many would with a paged cache.

    The requests are prompts of three eighths of the context with answers of a quarter, so that half
    of it is in use on average. What a sequence takes besides its cache is that between one sequence
    and as many as fit.
    """
    tried = _asked_for(asked, 1, context)
    most = largest_batch(tried)
    one = tried.estimate().ledger.terms
    cache = sum(t.size_bytes for t in one if t.name in CACHE_TERMS and t.phase in LATEST)
    prompt, answer = context * 3 // 8, context // 4
    holding = mean_holding([Serving(prompt, answer)], context, BLOCK_SIZE)
    paged = None
    if most is not None and cache:
        at_most = _asked_for(asked, most, context).estimate().ledger.terms
        paged = _paged(tried.budget.budget_bytes, _held(one), _held(at_most), most, cache, holding)
    decode = NO_SPEED if most is None else _decode(asked, place, reads, 16, most, context)
    return Sequences(asked.bits, context, most, cache, paged, int(holding.used_slots), decode)


def _held(terms: Sequence[MemoryTerm]) -> int:
    """The peak without the pool, which is what the budget has left over."""
    return peak([t for t in terms if t.name != "buffer_pool"])[1]


def _paged(
    budget_bytes: int, one: int, at_most: int, most: int, cache: int, holding: Holding
) -> int:
    each = (at_most - one) / (most - 1) if most > 1 else float(cache)
    paged = each - cache * (1 - float(holding.paged_slots / holding.contiguous_slots))
    return max(most, int((budget_bytes - (one - each)) / paged)) if paged > 0 else most
