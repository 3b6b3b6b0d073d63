"""Memory of a generation from mlx-lm's own code, traced without weights and without evaluation.

The model is built lazily, each kind of call is exported as a graph with the parameters and the
caches' arrays as inputs, and ``uma.memory.liveness`` finds the peak on the graph.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from uma.architecture import architecture_from_config
from uma.architecture.layers import Recurrent
from uma.errors import CheckpointError, UnsupportedModel
from uma.memory.activations import STEPPED, STEPPED_WITHOUT_KERNEL
from uma.memory.kv_cache import calls
from uma.memory.liveness import MAX_ACTIVE_TASKS, Peak, evaluation, evaluation_order
from uma.memory.timeline import DISPATCHES_PER_TASK
from uma.runtime.cache import quantizable
from uma.runtime.load import weights_bytes
from uma.runtime.trace_caches import TokenRecorder, bytes_by_kind, fresh, parts
from uma.runtime.trace_graph import Call, arrays_of, call_graph, unchanged
from uma.runtime.trace_model import Format, lazy_model
from uma.runtime.trace_stand_ins import StandIns, replaced
from uma.workload import Backend, Inference

MAX_STEPS = 8192  # layers x tokens: about 100,000 operations

# So many operations meet every place in a task; of fewer, several places are tried.
MANY_OPERATIONS = 2000


@dataclass(frozen=True, slots=True)
class Traced:
    """What a trace found, in bytes.

    The peaks are those of evaluation in order, as under a memory limit; those ``_ahead`` bound a
    free run, where MLX has up to ten tasks waiting. Caches and states are those after the last
    token, ``prefill_cache_bytes`` the most of the caches over the prompt. ``stand_ins`` were put in
    the place of operations that the graph would not show.
    """

    backend: Backend
    weights_bytes: int
    cache_bytes: int
    state_bytes: int
    prefill_cache_bytes: int
    prefill_peak_bytes: int
    decode_peak_bytes: int
    prefill_peak_ahead_bytes: int
    decode_peak_ahead_bytes: int
    largest_buffer_bytes: int
    num_operations: int
    stand_ins: tuple[str, ...]


def trace(
    config: Mapping[str, Any],
    quantization: Format,
    workload: Inference,
    backend: Backend = "cpu",
    *,
    dtype: str = "bfloat16",
) -> Traced:
    """Trace the generation that ``workload`` asks of the model that ``config`` describes.

    ``dtype`` is that of activations, and of weights that ``quantization`` leaves alone.

    Raises:
        UnsupportedModel: If mlx-lm has no such module, or its code cannot be traced.
        CheckpointError: If mlx-lm cannot build the model from ``config``.
    """
    _check_steps(config, workload, backend)
    model = lazy_model(config, quantization, dtype)
    stand_ins = StandIns()
    with replaced(stand_ins, backend):
        try:
            return _Generation(model, workload, backend, stand_ins).traced()
        except (ValueError, TypeError, RuntimeError, AttributeError, IndexError) as error:
            raise UnsupportedModel(
                f"model_type {config.get('model_type')!r} cannot be traced: {error}"
            ) from error


def _check_steps(config: Mapping[str, Any], workload: Inference, backend: Backend) -> None:
    """Refuse a graph with more steps of recurrences than can be traced in a minute or so."""
    try:
        layers = architecture_from_config(config).layers
    except (UnsupportedModel, CheckpointError):
        return
    stepped = STEPPED if backend == "metal" else STEPPED | STEPPED_WITHOUT_KERNEL
    mixers = [mixer for layer in layers for mixer in layer.mixers]
    count = sum(isinstance(mixer, Recurrent) and mixer.kind in stepped for mixer in mixers)
    tokens = min(workload.prefill_step_size, workload.longest_prompt_tokens)
    if count * tokens > MAX_STEPS:
        raise UnsupportedModel(
            f"mlx-lm steps {count} layers of model_type {config.get('model_type')!r} token by "
            f"token on {backend}: {count * tokens:,} steps are too many to trace; give a "
            f"--prefill-step-size of at most {MAX_STEPS // count}"
        )


@dataclass(slots=True)
class _Peaks:
    """The most of one phase, in order and running ahead."""

    serial: int = 0
    ahead: int = 0

    def add(self, serial: Peak, ahead: Peak, overlap: int) -> None:
        self.serial = max(self.serial, serial.size_bytes)
        self.ahead = max(self.ahead, max(ahead.size_bytes, serial.size_bytes) + overlap)


class _Generation:
    """Caches that advance call by call, and the peaks on the way."""

    def __init__(
        self, model: nn.Module, workload: Inference, backend: Backend, stand_ins: StandIns
    ) -> None:
        from mlx_lm.models.cache import make_prompt_cache

        model.eval()
        self.model = model
        self.workload = workload
        self.backend = backend
        self.stand_ins = stand_ins
        self.caches: list[Any] = list(make_prompt_cache(model))
        self.quantized: tuple[int, ...] = ()
        if workload.kv_bits is not None:
            with unchanged(model):
                self.quantized = quantizable(
                    model, kv_bits=workload.kv_bits, kv_group_size=workload.kv_group_size
                )
        self.buffers: list[int] = []
        self.traced_tokens = 1
        self.recorder = TokenRecorder()
        self.prefill = _Peaks()
        self.decode = _Peaks()
        self.prompt_cache = self.largest = self.operations = 0

    def traced(self) -> Traced:
        self._prefill()
        self._decode()
        cache, state = bytes_by_kind(self.caches)
        return Traced(
            self.backend,
            weights_bytes(self.model),
            cache,
            state,
            self.prompt_cache,
            self.prefill.serial,
            self.decode.serial,
            self.prefill.ahead,
            self.decode.ahead,
            self.largest,
            self.operations,
            self.stand_ins.names,
        )

    def _prefill(self) -> None:
        """Trace the chunk with the most pairs of new and cached tokens, and the last one.

        The first one too where its caches are quantized, which takes both forms at once, and where
        there are states, as they may keep arrays of the whole chunk.
        """
        step = self.workload.prefill_step_size
        chunks = list(calls(self.workload.longest_prompt_tokens, step))[:-1]
        done = [sum(chunks[: i + 1]) for i in range(len(chunks))]
        heaviest = max(range(len(chunks)), key=lambda i: chunks[i] * done[i], default=0)
        both = bool(self.quantized) or any(hasattr(part, "cache") for part in parts(self.caches))
        traced = {heaviest, len(chunks) - 1} | ({0} if both else set())
        for i, tokens in enumerate(chunks):
            if i in traced:
                self._trace(Call(tokens, logits=False), self.prefill)
            else:
                self._advance(tokens)
            self.prompt_cache = max(self.prompt_cache, bytes_by_kind(self.caches)[0])

    def _decode(self) -> None:
        """Trace the prompt's last token, the last call that grows a cache, and the last one."""
        tokens = self.workload.context_tokens - self.workload.longest_prompt_tokens
        self._trace(Call(1, logits=True), self.decode)
        self.prompt_cache = max(self.prompt_cache, bytes_by_kind(self.caches)[0])
        growing: tuple[list[Any], list[int]] | None = None
        for _ in range(tokens - 1):
            before = fresh(self.caches), self.buffers
            held = sum(bytes_by_kind(self.caches))
            self._advance(1)
            if sum(bytes_by_kind(self.caches)) != held:
                growing = before
        if tokens > 0:
            self._trace(Call(1, logits=True), self.decode)
        if growing is not None:
            end = self.caches, self.buffers
            self.caches, self.buffers = growing
            self._trace(Call(1, logits=True), self.decode)
            self.caches, self.buffers = end

    def _trace(self, call: Call, peaks: _Peaks) -> None:
        self.recorder.watch(self.caches)
        graph, states = call_graph(
            self.model,
            self.caches,
            call,
            self.stand_ins,
            batch_size=self.workload.batch_size,
            quantize=self._quantize,
            buffers=self.buffers,
        )
        self.recorder.stop()
        order = evaluation_order(graph)
        starts = range(0, DISPATCHES_PER_TASK, 3) if len(order) < MANY_OPERATIONS else (0,)
        found = evaluation(graph, order, self.backend)
        serial = max(
            (found.peak(graph, dispatched=start) for start in starts),
            key=lambda peak: peak.size_bytes,
        )
        ahead = found.peak(graph, tasks_ahead=MAX_ACTIVE_TASKS)
        peaks.add(serial, ahead, self._overlap(call, ahead))
        self.buffers = [serial.buffers.get(i, graph.arrays[i].nbytes) for i in states]
        self.largest = max(self.largest, serial.largest_buffer_bytes)
        self.operations = max(self.operations, serial.num_operations)
        self.traced_tokens = call.tokens
        self.caches = fresh(self.caches)

    def _overlap(self, call: Call, ahead: Peak) -> int:
        """What the call before may still hold: decoding starts a call while that one runs.

        Its pending tasks, and its logits and those before, which generation has yielded.
        """
        return ahead.pending_bytes + 2 * ahead.root_bytes if call.logits else 0

    def _advance(self, tokens: int) -> None:
        """One call without its graph: the caches are fed what the traced call fed them.

        Where a state is a view of an array of the whole call, that array shrinks with the call.
        """
        before = [array.nbytes for cache in self.caches for array in arrays_of(cache)]
        if not self.recorder.replay(self.caches, tokens):
            self.recorder.watch(self.caches)
            shape = (self.workload.batch_size, tokens)
            with unchanged(self.model):
                self.model(mx.zeros(shape, mx.int32), cache=self.caches)
            self.recorder.stop()
        self.caches = fresh(self.caches)
        after = [array.nbytes for cache in self.caches for array in arrays_of(cache)]
        if len(before) != len(after):
            before = self.buffers = after
        self.buffers = [
            size + (kept - size) * tokens // self.traced_tokens if size == old else size
            for size, old, kept in zip(after, before, self.buffers, strict=True)
        ]

    def _quantize(self) -> None:
        """Quantize after a call the caches that are not yet, as mlx-lm does."""
        workload = self.workload
        for i in self.quantized:
            if hasattr(self.caches[i], "to_quantized"):
                self.caches[i] = self.caches[i].to_quantized(
                    group_size=workload.kv_group_size, bits=workload.kv_bits
                )
