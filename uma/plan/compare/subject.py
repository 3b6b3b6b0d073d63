"""The model that is compared, in every width and under every engine, each made once."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import field, replace
from typing import Any, TypeVar, cast

from uma.architecture.layers import Architecture
from uma.checkpoint.source import ModelSource
from uma.errors import UmaError
from uma.frozen import dataclass
from uma.ledger import peak
from uma.machine import Budget, Machine, budget_of
from uma.memory.reads import ExpertReads, Stored, WeightReads, weight_reads
from uma.memory.term import MemoryTerm
from uma.plan.engine_case import EngineCase, engine_case
from uma.plan.engine_words import format_of_bits, stored_format
from uma.plan.estimate import Asked, Change
from uma.plan.inference import Request
from uma.plan.layer_offload import LayerOffload, layer_bytes, offloads
from uma.plan.mlx_case import MlxCase, mlx_case
from uma.speed.stored import even_reads, gguf_stored
from uma.workload import Engine, Inference

T = TypeVar("T")

# Settings of a quantized cache, by engine and width, and the bits of a number, scales included.
CACHES: dict[tuple[Engine, int], dict[str, str]] = {
    ("llama.cpp", 8): {"cache_type_k": "q8_0", "cache_type_v": "q8_0"},
    ("llama.cpp", 4): {"cache_type_k": "q4_0", "cache_type_v": "q4_0"},
    ("vllm", 8): {"kv_cache_dtype": "fp8"},
}
SCALE_BITS = {"llama.cpp": 0.5, "mlx": 0.5, "vllm": 0.0}  # 16 for 32 numbers, 32 for 64, none
# Formats of repositories that all engines load as they are, and the bits of a weight. llama.cpp
# keeps such experts in every mix of its own, F16 included (src/llama-quant.cpp).
NATIVE = {"mxfp4": 4}
_UNIT = 10**9  # bytes of weights that shares are computed for


@dataclass(frozen=True, slots=True)
class Subject:
    """A model and what is asked of it; what was computed for one machine serves the next.

    Memory is held for the workload's context, of which ``used_tokens`` are in use where the speed
    is looked at: all of it by default. Engines that have no cache of the workload's ``kv_bits``
    have no plan.
    """

    source: ModelSource
    architecture: Architecture
    workload: Inference
    used_tokens: int | None = None
    known: dict[Any, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Those in the cache, or of the prompt, where the speed is looked at."""
        return self.used_tokens or self.workload.context_tokens

    @property
    def native(self) -> str | None:
        """The format that the model was made in, if engines load it as it is: its widest."""
        stored = stored_format("vllm", self.source.config or {})
        return stored if stored in NATIVE else None

    def width(self, bits: int) -> int:
        """``bits``, of which a model that was made in fewer has no more."""
        return bits if self.native is None else min(bits, NATIVE[self.native])

    def repeats(self, bits: int) -> bool:
        """Whether MLX and vLLM load in this width what they load in the widest: it as made."""
        return self.native is not None and self.width(16) <= bits < 16

    def case(self, engine: Engine, bits: int, machine: Machine) -> Asked | None:
        """The model in this width on this machine; ``None`` where it cannot be had so."""
        return self.mlx(bits, machine) if engine == "mlx" else self.other(engine, bits, machine)

    def mlx(self, bits: int, machine: Machine) -> MlxCase | None:
        def make() -> MlxCase | None:
            workload = self.workload
            request = Request(
                context_tokens=workload.context_tokens,
                batch_size=workload.batch_size,
                kv_bits=workload.kv_bits,
            )
            try:
                return mlx_case(self.source, machine, request, architecture=self.architecture)
            except UmaError:
                return None

        if self.native is not None and self.width(bits) == self.width(16):
            bits = self.width(16)
        key = ("mlx", machine.backend)
        first = self.once(key, make)
        if first is None:
            return None
        found = self.once((*key, bits), lambda: first.changed(Change(bits=bits)))
        return None if found is None else found.on(machine)

    def other(self, engine: Engine, bits: int, machine: Machine) -> EngineCase | None:
        key = (engine, machine.kind)
        usual = self.once(key, lambda: self._usual(engine, machine))
        if usual is None:
            return None
        found = self.once((*key, bits), lambda: self._in_width(usual, bits))
        if found is None or (self.source.gguf_headers and found is not usual):
            return None
        settings, devices = found.settings, len(machine.devices)
        if engine != "vllm" and devices and settings.num_devices != devices:
            settings = replace(settings, num_devices=devices)
        budget = self._budget(machine)
        return replace(found, machine=machine, budget=budget, settings=settings)

    def _budget(self, machine: Machine) -> Budget:
        """Of the machine last asked for, which is asked for in every width."""
        last: tuple[Machine, Budget] | None = self.known.get("budget")
        if last is None or last[0] is not machine:
            last = self.known["budget"] = machine, budget_of(machine)
        return last[1]

    def _usual(self, engine: Engine, machine: Machine) -> EngineCase | None:
        """In the engine's usual format, or that of the file; ``None`` if it cannot run it so."""
        files, width = self.source.gguf_headers, self.workload.kv_bits
        options = {} if width is None else CACHES.get((engine, width))
        if options is None:
            return None
        try:
            return engine_case(
                self.architecture,
                engine,
                None,
                replace(self.workload, kv_bits=None),
                budget_of(machine),
                machine,
                options,
                model=self.source.name,
                file=files[0] if files and engine == "llama.cpp" else None,
            )
        except UmaError:
            return None

    def _in_width(self, case: EngineCase, bits: int) -> EngineCase | None:
        if bits == case.bits and not (self.native and case.engine == "vllm"):
            return case
        if bits not in case.widths:
            return None
        quant = format_of_bits(case.engine, bits)
        if self.native is not None and case.engine == "vllm":
            quant = self.native
        try:
            found = case.stored_as(quant)
            self.terms(found)
        except UmaError:
            return None
        return found

    def cache_bits(self, engine: Engine) -> float:
        """Bits of a number of the cache, scales included."""
        width = self.workload.kv_bits
        return 16 if width is None else width + SCALE_BITS[engine]

    def terms(self, case: EngineCase) -> tuple[MemoryTerm, ...]:
        """Of the whole model on a device, or on several together."""
        place = (case.engine, len(case.machine.devices), case.machine.kind)

        def make() -> tuple[MemoryTerm, ...]:
            if case.engine != "llama.cpp":
                return case.terms(case.workload)
            # Its other terms do not depend on the format.
            terms = self.once(("beside", *place), lambda: case.terms(case.workload))
            size = case.card_bytes if case.machine.kind == "discrete" else case.weights.size_bytes
            return tuple(replace(t, size_bytes=size) if t.name == "weights" else t for t in terms)

        return self.once(("terms", case.format, *place), make)

    def needed_bytes(self, case: EngineCase) -> int:
        place = (case.engine, len(case.machine.devices), case.machine.kind)
        return self.once(("needed", case.format, *place), lambda: peak(self.terms(case))[1])

    def cache_bytes(self, case: EngineCase) -> int:
        return cached_bytes(self.terms(case))

    def offloads(self, case: EngineCase) -> list[LayerOffload]:
        """Every way of llama.cpp to leave something on the host, from the least to the most."""
        key = ("offloads", case.format, len(case.machine.devices))
        return self.once(key, lambda: list(offloads(case, self.needed_bytes(case))))

    def layer_bytes(self, case: EngineCase) -> list[int]:
        return self.once(("layers", case.format), lambda: layer_bytes(case))

    def even_reads(self, weights_bytes: int) -> WeightReads:
        """Of weights that are all in the same bits: a few percent off where they are not."""
        unit = self.once("even", lambda: even_reads(self.architecture, _UNIT))
        part = weights_bytes / _UNIT
        experts = tuple(replace(one, size_bytes=one.size_bytes * part) for one in unit.experts)
        return replace(unit, dense_bytes=unit.dense_bytes * part, experts=experts)

    def reads(self, case: EngineCase) -> WeightReads:
        """Of every weight as llama.cpp's mix keeps it, else of all alike."""
        if case.engine != "llama.cpp" or self.source.gguf_headers:
            return self.even_reads(case.weights.size_bytes)
        parts = self._parts(case.format)
        return self.once(("reads", case.format), lambda: joined(parts, parts))

    def split_reads(self, quant: str, offload: LayerOffload) -> tuple[WeightReads, WeightReads]:
        """What the devices read of the weights, and what the host does."""

        def make() -> tuple[WeightReads, WeightReads]:
            parts = self._parts(quant)
            host, device = parts[: offload.layers], parts[offload.layers :]
            if offload.whole:
                return joined(device, device), joined(host, host)
            return joined(parts, device), joined([], host)

        return self.once(("split", quant, offload.layers, offload.whole), make)

    def _parts(self, quant: str) -> list[WeightReads]:
        """What each layer reads, in their order, and at last all that is in no layer."""
        return self.once(("parts", quant), lambda: _parts(self.architecture, quant))

    def once(self, key: Any, make: Callable[[], T]) -> T:
        if key not in self.known:
            self.known[key] = make()
        return cast(T, self.known[key])


def cached_bytes(terms: Iterable[MemoryTerm]) -> int:
    """Of the caches and states of all sequences, as they are kept while they generate."""
    names = ("kv_cache", "recurrent_state")
    return sum(t.size_bytes for t in terms if t.name in names and t.phase != "prefill")


def _parts(architecture: Architecture, quant: str) -> list[WeightReads]:
    layers: list[list[Stored]] = [[] for _ in range(len(architecture.layers) + 1)]
    for one in gguf_stored(architecture, quant):
        layers[-1 if one.layer is None else one.layer].append(one)
    alike: dict[Any, WeightReads] = {}
    found = []
    for index, layer in enumerate(layers):
        last = index == len(architecture.layers)
        key = (last, tuple(sorted((one.shape, one.size_bytes) for one in layer)))
        if key not in alike:
            alike[key] = weight_reads(architecture, layer)
        found.append(alike[key])
    return found


def joined(dense: Sequence[WeightReads], experts: Sequence[WeightReads]) -> WeightReads:
    """The reads of several parts together, of ``dense`` without their experts."""
    sums: dict[tuple[int, int], list[float]] = {}
    for part in experts:
        for one in part.experts:
            size = sums.setdefault((one.num_experts, one.num_experts_per_tok), [0.0, 0.0])
            size[0] += one.size_bytes
            size[1] += one.elements
    return WeightReads(
        sum(part.dense_bytes for part in dense),
        sum(part.elements for part in dense),
        tuple(ExpertReads(size[0], size[1], *counts) for counts, size in sums.items()),
        sum(part.head_elements for part in dense),
    )
