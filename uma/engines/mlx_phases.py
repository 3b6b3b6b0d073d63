"""Caches and temporaries of mlx-lm's prefill and decode, at the moment when they are largest.

mlx-lm 0.32.2, ``generate.py``, ``generate_step``: the prompt but its last token runs in chunks of
``prefill_step_size``, for which only the caches are evaluated; then one token at a time, two
steps in flight.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import field, replace
from functools import cached_property, partial
from typing import Any, TypeVar, cast

from uma.architecture.layers import Architecture, Layer, Recurrent
from uma.engines.mlx_cache import EXPANDED, OWN_ATTENTION, layer_caches
from uma.frozen import dataclass
from uma.memory.activations import Call, Transient, held_bytes, kept_bytes, largest, layer_transient
from uma.memory.kv_cache import LayerCache, Slots, TokenCache, cache_bytes, state_bytes, trace
from uma.memory.metal_activations import STEADY_LAYERS, LayerTape, layer_tape, run_ahead
from uma.workload import Backend, Inference

LONG_STEP = 512  # the chunks of shorter ones hold too little to tell apart
STEPS_IN_FLIGHT = 2  # generate_step runs one token ahead of the one it yields


T = TypeVar("T")
Shared = dict[Any, Any]
"""What holds for all formats of one model whose activations are as wide, by its own keys."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Caches after a call, and what the call has alive beside them."""

    cache_bytes: int
    transient: Transient

    @property
    def total(self) -> int:
        return self.cache_bytes + self.transient.total


@dataclass(frozen=True)
class Generation:
    """A model as it is held, and what is asked of it.

    ``known`` are moments of prompts that were worked out, of the same model in the same form;
    ``shared`` is what of them does not depend on that form.
    """

    architecture: Architecture
    workload: Inference
    weight_bytes: int
    backend: Backend
    activation_bytes: int
    known: dict[tuple[str, Inference], "Moment"] = field(default_factory=dict)
    shared: Shared = field(default_factory=dict)

    def once(self, key: object, make: Callable[[], T]) -> T:
        if key not in self.shared:
            self.shared[key] = make()
        return cast(T, self.shared[key])

    @cached_property
    def weight_elements(self) -> float:
        """Elements of MLX arrays per parameter: packed 32-bit words, scales and biases, or one."""
        per_parameter = self.weight_bytes / max(1, self.architecture.num_parameters)
        return 1.0 if per_parameter > 1.5 else per_parameter / 4 + 1 / 64

    @cached_property
    def layer_caches(self) -> tuple[LayerCache, ...]:
        return layer_caches(
            self.architecture,
            kv_bits=self.workload.kv_bits,
            kv_group_size=self.workload.kv_group_size,
        )

    @cached_property
    def caches(self) -> dict[int, tuple[TokenCache, ...]]:
        """Caches that grow with the text, by layer."""
        return {
            layer.layer: tuple(c for c in layer.caches if isinstance(c, TokenCache))
            for layer in self.layer_caches
        }

    @cached_property
    def cache_groups(self) -> dict[tuple[TokenCache, ...], list[int]]:
        """Layers by the caches that they hold: most models have one or two kinds."""
        workload = self.workload
        return self.once((workload.kv_bits, workload.kv_group_size), self._cache_groups)

    def _cache_groups(self) -> dict[tuple[TokenCache, ...], list[int]]:
        groups: dict[tuple[TokenCache, ...], list[int]] = {}
        for layer, caches in self.caches.items():
            groups.setdefault(caches, []).append(layer)
        return groups

    @property
    def state_bytes(self) -> int:
        return state_bytes(
            self.layer_caches,
            batch_size=self.workload.batch_size,
            dtype_bytes=self.activation_bytes,
        )

    @property
    def layers(self) -> tuple[tuple[int, Layer], ...]:
        """The kind of every layer."""
        return tuple(enumerate(self.architecture.kinds))

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """For every layer the first of its kind that has the same caches."""
        first: dict[object, int] = {}
        caches = self.caches
        return tuple(
            first.setdefault((id(layer), caches.get(index)), index)
            for index, layer in enumerate(self.architecture.kinds)
        )

    @cached_property
    def kinds(self) -> tuple[tuple[Layer, int], ...]:
        """Each kind of layer, and how many there are."""
        layers = {id(layer): layer for layer in self.architecture.kinds}
        counts = Counter(map(id, self.architecture.kinds))
        return tuple((layers[key], count) for key, count in counts.items())

    @cached_property
    def evaluated(self) -> tuple[tuple[int, Layer], ...]:
        """The layers that a prefill chunk runs: no cache needs what follows the last one's input.

        A recurrent last layer runs its mixer, whose state is cached.
        """
        last = max(self.caches, default=0)
        *before, end = self.layers[: last + 1]
        if any(isinstance(mixer, Recurrent) for mixer in end[1].mixers):
            before.append((last, replace(end[1], feed_forward=())))
        return tuple(before)

    def tape(self, layer: Layer, call: Call, grown_bytes: int) -> LayerTape:
        """The operations of a layer on Metal, told of its weights by their number."""
        made = partial(layer_tape, layer, self.architecture.hidden_size, call, 1.0, grown_bytes)
        # By the layer's identity, which lasts as long as the layer: it is kept beside them.
        return self.once((id(layer), call, grown_bytes), lambda: (layer, made()))[1]

    def slot_bytes(self, cache: TokenCache) -> int:
        return self.workload.batch_size * cache.slot_bytes(self.activation_bytes)

    def call(self, tokens: int, cached_tokens: int) -> Call:
        return Call(
            tokens,
            cached_tokens,
            self.workload.batch_size,
            self.activation_bytes,
            self.workload.kv_bits if cached_tokens else None,
            self.workload.kv_group_size,
            expanded=self.architecture.module in EXPANDED,
            unfused=self.architecture.module in OWN_ATTENTION,
        )

    def layer_call(self, index: int, call: Call) -> Call:
        """The call as one layer sees it: only some layers' caches are quantized."""
        if call.kv_bits is None or any(cache.kv_bits for cache in self.caches.get(index, ())):
            return call
        return replace(call, kv_bits=None)


def chunks(workload: Inference) -> list[tuple[int, int, int]]:
    """Prefill chunks that can need most: (index, tokens, cached tokens).

    The first finds empty caches, the last full one and the last one the longest.
    """
    step, tokens = workload.prefill_step_size, workload.longest_prompt_tokens - 1
    if tokens < 1:
        return []
    last = -(-tokens // step) - 1
    indices = sorted({0, min(1, last), max(0, last - 1), last})
    return [(i, min(step, tokens - i * step), i * step) for i in indices]


def shorter_ends(workload: Inference) -> list[tuple[int, int, int]]:
    """The last chunk of a shorter prompt, half a long step.

    On Metal operations share command buffers by their arrays' sizes, so that a shorter chunk may
    need more than a longer one.
    """
    step = workload.prefill_step_size
    if step < LONG_STEP:
        return []
    index, tokens, cached = chunks(workload)[-1]
    part = step // 2 - 1
    return [(index, part, cached)] if part < tokens else []


def prefill(
    generation: Generation, workload: Inference, ends: Sequence[tuple[int, int, int]] = ()
) -> Moment:
    """The most that a chunk of the prompt of ``workload`` needs, or only one of ``ends``.

    The caches are the largest that stand after a chunk, and the temporaries what the chunk that
    needs most holds above them: that may be another one, where sliding caches shrink.
    """

    def steps() -> list[_Step]:
        traces = _traces(generation, workload)
        return [
            _chunk(generation, traces, index, generation.call(tokens, cached))
            for index, tokens, cached in ends or chunks(workload)
        ]

    found = generation.once((workload, *ends), steps)
    moments = [_moment(generation, step) for step in found]
    most = max(moments, key=lambda moment: moment.total)
    cache = max(moment.cache_bytes for moment in moments)
    activations = most.total - cache - most.transient.attention
    if activations >= 0:
        return Moment(cache, replace(most.transient, activations=activations))
    return Moment(cache, Transient(0, most.total - cache))


def prefill_cache_bytes(generation: Generation, workload: Inference) -> int:
    """The largest caches that stand after a chunk."""

    def largest() -> int:
        traces = _traces(generation, workload)
        return max((_after(generation, traces, index) for index, *_ in chunks(workload)), default=0)

    return generation.once(("prefill caches", workload), largest)


def _traces(generation: Generation, workload: Inference) -> dict[TokenCache, dict[int, Slots]]:
    return {
        cache: trace(cache, workload.longest_prompt_tokens, workload.prefill_step_size)
        for caches in generation.cache_groups
        for cache in caches
    }


def _after(generation: Generation, traces: dict[TokenCache, dict[int, Slots]], index: int) -> int:
    return sum(
        len(layers) * generation.slot_bytes(cache) * traces[cache][index].slots
        for caches, layers in generation.cache_groups.items()
        for cache in caches
    )


@dataclass(frozen=True, slots=True)
class _Step:
    """Caches after a call, what is held beside it, and what it runs: on Metal the operations."""

    cache_bytes: int
    held_bytes: int
    runs: Transient | tuple[list[LayerTape], int]


def _moment(generation: Generation, step: _Step) -> Moment:
    runs = step.runs
    transient = (
        runs if isinstance(runs, Transient) else run_ahead(*runs, generation.weight_elements)
    )
    return Moment(step.cache_bytes, transient + Transient(step.held_bytes))


def _chunk(
    generation: Generation, traces: dict[TokenCache, dict[int, Slots]], index: int, call: Call
) -> _Step:
    grown: dict[int, int] = {}
    for caches, layers in generation.cache_groups.items():
        if index and any(traces[c][index].slots != traces[c][index - 1].slots for c in caches):
            size = sum(generation.slot_bytes(c) * traces[c][index].slots for c in caches)
            grown |= dict.fromkeys(layers, size)
    held = sum(count * held_bytes(layer, call) for layer, count in generation.kinds)
    if index == 0:
        held += _unquantized(generation, traces)
    runs = _runs(generation, generation.evaluated, grown, call)
    return _Step(_after(generation, traces, index), held, runs)


def _unquantized(generation: Generation, traces: dict[TokenCache, dict[int, Slots]]) -> int:
    """The first chunk's caches before they are quantized, which is evaluated last of all."""
    extra = 0
    for caches, layers in generation.cache_groups.items():
        for cache in caches:
            if cache.kv_bits is not None:
                full = generation.slot_bytes(replace(cache, kv_bits=None))
                saved = full - generation.slot_bytes(cache)
                extra += len(layers) * saved * traces[cache][0].slots
    return extra


def decode(generation: Generation, workload: Inference) -> Moment:
    """The last token of the context; caches grow by a step somewhere on the way.

    Sliding layers start with what a chunk of the prompt left, and shrink with the first token.
    """
    step = generation.once(("decode", workload), lambda: _token(generation, workload))
    return _moment(generation, step)


def _token(generation: Generation, workload: Inference) -> _Step:
    call = generation.call(1, max(workload.longest_prompt_tokens, workload.context_tokens) - 1)
    grown: dict[int, int] = {}
    for caches, layers in generation.cache_groups.items():
        size = sum(generation.slot_bytes(c) * _growing_slots(c, call) for c in caches)
        grown |= dict.fromkeys(layers, size)
    runs = _runs(generation, generation.layers, grown, call)
    end = decode_cache_bytes(generation, workload)
    shrunk = max(0, _before_last_token(generation, workload) - end)
    return _Step(end, shrunk, runs)


def decode_cache_bytes(generation: Generation, workload: Inference) -> int:
    """The caches after the prompt or after the last token, whichever are larger."""
    prompt = workload.longest_prompt_tokens

    def largest() -> int:
        sizes = cache_bytes(
            generation.layer_caches,
            prompt,
            workload.prefill_step_size,
            max(0, workload.context_tokens - prompt),
            batch_size=workload.batch_size,
            dtype_bytes=generation.activation_bytes,
        )
        return max(sizes.prefill_end, sizes.decode_end)

    return generation.once(("decode caches", workload), largest)


def _growing_slots(cache: TokenCache, call: Call) -> int:
    """Slots that a cache reallocates for one more token: a full rotating one overwrites.

    Llama 4's cuts its front and appends anew for every token once its chunk is full.
    """
    slots = call.cached_tokens + 1
    if cache.max_size is None or slots <= cache.max_size:
        return slots
    return 0 if cache.kind == "RotatingKVCache" else cache.max_size


def _before_last_token(generation: Generation, workload: Inference) -> int:
    """Bytes that the caches keep alive after the last chunk of the prompt."""
    ends = chunks(workload)
    if not ends:
        return 0
    index, tokens, cached = ends[-1]
    call = generation.call(tokens, cached)
    total = sum(count * kept_bytes(layer, call) for layer, count in generation.kinds)
    for caches, layers in generation.cache_groups.items():
        for cache in caches:
            states = trace(cache, workload.longest_prompt_tokens, workload.prefill_step_size)
            total += len(layers) * generation.slot_bytes(cache) * states[index].slots
    return total


def _runs(
    generation: Generation,
    layers: tuple[tuple[int, Layer], ...],
    grown: dict[int, int],
    call: Call,
) -> Transient | tuple[list[LayerTape], int]:
    """What ``layers`` have alive at most, or on Metal what they run, with the residual's bytes.

    ``grown`` are bytes of caches that are reallocated.
    """
    if generation.backend == "metal":
        tapes = _tapes(generation, layers, grown, call)
        if call.tokens == 1:
            tapes *= STEPS_IN_FLIGHT
        return tapes, call.array(generation.architecture.hidden_size)
    hidden = generation.architecture.hidden_size
    kinds = {}
    for i, layer in layers:
        seen = generation.layer_call(i, call)
        kinds[id(layer), seen.kv_bits] = (layer, seen)
    stages = [layer_transient(layer, hidden, seen) for layer, seen in kinds.values()]
    stages.append(Transient(call.array(2 * hidden) + max(grown.values(), default=0)))
    return largest(stages)


def _tapes(
    generation: Generation,
    layers: tuple[tuple[int, Layer], ...],
    grown: dict[int, int],
    call: Call,
) -> list[LayerTape]:
    """Equal layers are the same object; no more of them than ``run_ahead`` reads."""
    firsts = generation.firsts[: min(len(layers), STEADY_LAYERS)]
    own = {}
    for index in set(firsts):
        seen = generation.layer_call(index, call)
        own[index] = generation.tape(layers[index][1], seen, grown.get(index, 0))
    tapes = [own[index] for index in firsts]
    if not tapes:  # of a single layer whose output nothing needs
        return []
    last, layer = layers[len(tapes) - 1]
    if layer is not generation.architecture.kinds[last]:  # only a part of it runs
        seen = generation.layer_call(last, call)
        tapes[-1] = generation.tape(layer, seen, grown.get(last, 0))
    return tapes
