"""A model as it is asked for under llama.cpp, transformers or vLLM."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from uma.architecture import architecture_from_config
from uma.architecture.layers import Architecture
from uma.architecture.left_out import notes_under
from uma.catalog import model_config
from uma.checkpoint.names import resolve
from uma.engines.llama_cpp_weights import device_weight_bytes
from uma.errors import DoesNotFit, UmaError, UsageError
from uma.ledger import Ledger, peak
from uma.machine import Budget, Machine, verdict
from uma.memory.term import MemoryTerm
from uma.plan.engine_words import (
    BITS,
    DEFAULT_FORMATS,
    EIGHT_BIT_CACHE,
    FILE_TYPES,
    cache_words,
    format_of_bits,
    is_16_bit,
    setting_words,
)
from uma.plan.estimate import Change, Estimate, bits_per_weight
from uma.units import MIB, format_gib
from uma.workload import Engine, Inference

if TYPE_CHECKING:
    from uma.checkpoint.gguf import GGUFHeader

# What a process of llama.cpp holds on a card beside its own buffers, the most of three RTX 4090:
# "unaccounted" of llama.cpp's memory breakdown, whose total leaves out what the driver keeps
# (ggml-org/llama.cpp pull request 15860: 451, 456 and 456 MiB).
LLAMA_CPP_CONTEXT = 456 * MIB


@dataclass(frozen=True, slots=True)
class EngineCase:
    """``settings`` are the engine's own options; ``weights`` the term of the whole model.

    ``card_bytes`` of them are on a card under llama.cpp, whose host keeps the token embeddings.
    """

    architecture: Architecture
    engine: Engine
    format: str
    workload: Inference
    budget: Budget
    machine: Machine
    settings: Any
    weights: MemoryTerm
    card_bytes: int
    model: str | None = None

    @property
    def bits(self) -> int:
        """The number in llama.cpp's names, else the width next to what the weights take."""
        number = re.search(r"\d+", self.format) if self.engine == "llama.cpp" else None
        if number is not None:
            return int(number[0])
        taken = bits_per_weight(self.weights, self.architecture)
        return min(BITS[self.engine], key=lambda bits: abs(bits - taken))

    @property
    def widths(self) -> Sequence[int]:
        return tuple(BITS[self.engine])

    def terms(self, workload: Inference) -> tuple[MemoryTerm, ...]:
        rules = rules_of(self.engine)
        if self.engine == "llama.cpp" and self.machine.kind == "discrete":
            terms = rules.device_terms(
                self.architecture, self.format, workload, self.settings, self.card_bytes
            )
            return (*terms, _context_term(self.settings.runtime_context_bytes))
        found: tuple[MemoryTerm, ...] = rules.inference_terms(
            self.architecture, self.weights, workload, self.settings
        )
        return found

    def estimate(self) -> Estimate:
        found = self._on_devices(self.workload)
        result = verdict(peak(found)[1], self.budget)
        settings = self.settings
        if self.engine == "transformers":
            settings = rules_of(self.engine).resolved(self.architecture, settings)
        words = setting_words(self.engine, settings, self.workload)
        if self.engine == "vllm" and self._devices > 1:
            words = (
                *rules_of(self.engine).parallel_words(self.architecture, self._devices),
                *words,
            )
        return Estimate(
            architecture=self.architecture,
            machine=self.machine,
            engine=self.engine,
            format=self.format,
            workload=self.workload,
            budget=self.budget,
            ledger=Ledger(found, self.budget.budget_bytes, self.budget.limit_bytes, result),
            bits_per_weight=bits_per_weight(self.weights, self.architecture),
            cache_type=cache_words(self.engine, self.settings),
            settings=words,
            largest_buffer_bytes=self._largest_buffer(found),
            notes=tuple(self._notes()),
        )

    def _notes(self) -> Iterator[str]:
        rules = rules_of(self.engine)
        if self.engine == "transformers":
            yield from rules.notes(self.architecture, self.settings)
        elif self.engine == "llama.cpp":
            yield from rules.notes(self.architecture)
        if self._packs_nothing():
            yield (
                f"{self.format} packs matrices of kinds that this model has none of: its weights "
                "stay in 16 bits"
            )
        yield from notes_under(self.engine, self.architecture)
        if (
            self.engine == "llama.cpp"
            and self.settings.cache_ram_mib
            and self.machine.kind == "discrete"
        ):
            yield (
                f"{self.settings.cache_ram_mib} MiB of saved prompts are in the host's memory, "
                "beside these terms"
            )
        if self.engine == "llama.cpp" and (self.machine.kind, self.machine.os) == ("host", "Linux"):
            yield "uma run would run MLX here: --engine mlx says what that needs"
        if self.engine != "llama.cpp" and self.machine.kind == "host":
            yield f"this machine has no card: {self.engine}'s terms are those of a CUDA card"
        if self._devices > 1:
            yield self._split()
        if self.engine == "vllm" and self._devices == 1:
            yield self._reservation()

    def _packs_nothing(self) -> bool:
        """Whether the format leaves every matrix as it is, as mxfp4 does those of a dense model."""
        if self.engine == "llama.cpp" or bits_per_weight(self.weights, self.architecture) < 16:
            return False
        from uma.engines.schemes import scheme_named

        return scheme_named(self.format).bits < 16

    @property
    def _devices(self) -> int:
        return len(self.machine.devices)

    def _on_devices(self, workload: Inference) -> tuple[MemoryTerm, ...]:
        """``terms`` on all cards together: vLLM has more than the weights of a model on each."""
        found = self.terms(workload)
        if self.engine != "vllm" or self._devices < 2:
            return found
        split: tuple[MemoryTerm, ...] = rules_of("vllm").on_devices(
            found, self.architecture, self._devices
        )
        return split

    def _split(self) -> str:
        """How several cards hold one model."""
        if self.engine == "vllm" and rules_of("vllm").splits_heads(
            self.architecture, self._devices
        ):
            return (
                f"vLLM takes one card unless --tensor-parallel-size {self._devices} splits every "
                "matrix over all; activations and graphs are on each"
            )
        words = "the weights are split by whole layers, so that up to one layer's size may stay "
        return f"{words}unused on each card"

    def _reservation(self) -> str:
        """What vLLM takes of a card at its start, and the sequences that it has room for."""
        rules, device = rules_of(self.engine), self.machine.memory_bytes
        room = "no room for a cache"
        with suppress(DoesNotFit):
            blocks = rules.num_blocks(self.architecture, self.weights, device, self.settings)
            one = rules.sequence_blocks(
                self.architecture, self.workload.context_tokens, self.settings
            )
            room = f"room for {blocks // max(1, one.blocks):,} such sequences"
        return (
            f"vLLM takes {format_gib(rules.reserved_bytes(device, self.settings))} of the card at "
            f"its start, whatever is asked: {room}"
        )

    def excess_bytes(self, workload: Inference, limit_bytes: int) -> int:
        return peak(self._on_devices(workload))[1] - limit_bytes

    def changed(self, change: Change) -> "EngineCase | None":
        workload = replace(
            self.workload,
            context_tokens=change.context_tokens or self.workload.context_tokens,
            batch_size=change.batch_size or self.workload.batch_size,
        )
        settings = self.settings
        if change.eight_bit_cache:
            if self.engine not in EIGHT_BIT_CACHE or not is_16_bit(self.engine, settings):
                return None
            settings = replace(settings, **EIGHT_BIT_CACHE[self.engine][0])
        tried = replace(self, workload=workload, settings=settings)
        try:
            if change.bits is not None and (change.bits != self.bits or self._packs_nothing()):
                tried = tried.stored_as(format_of_bits(self.engine, change.bits))
            tried.terms(workload)
        except UmaError:
            return None
        return tried

    def stored_as(self, quant: str) -> "EngineCase":
        """The same with the weights in format ``quant``.

        Raises:
            UnknownName: If the engine has no such format.
        """
        rules = rules_of(self.engine)
        weights = rules.weights_term(self.architecture, quant)
        card_bytes = 0
        if self.engine == "llama.cpp" and self.machine.kind == "discrete":
            card_bytes = device_weight_bytes(self.architecture, quant)
        return replace(self, format=quant, weights=weights, card_bytes=card_bytes)

    def options(self, change: Change) -> tuple[str, ...]:
        found: list[str] = []
        if change.bits is not None:
            found += ["--quant", format_of_bits(self.engine, change.bits)]
        if change.eight_bit_cache:
            found += EIGHT_BIT_CACHE[self.engine][1]
        if change.context_tokens is not None:
            found += ["--context", str(change.context_tokens)]
        if change.batch_size is not None:
            found += ["--batch-size", str(change.batch_size)]
        return tuple(found)

    def stored_in(self, file: "GGUFHeader") -> "EngineCase":
        """The same with the tensors of a GGUF file, which llama.cpp loads as they are."""
        whole = file.size_bytes
        sizes = {tensor.name: tensor.size_bytes for tensor in file.tensors}
        embeddings = sizes.get("token_embd.weight", 0)
        tied = "output.weight" not in sizes  # then a copy of the embeddings is the head
        named = FILE_TYPES.get(file.metadata.get("general.file_type", -1), self.format)
        return replace(
            self,
            format=named,
            weights=MemoryTerm("weights", whole, "exact", "GGUF header"),
            card_bytes=whole if tied else whole - embeddings,
        )

    def of_model(self, name: str) -> "EngineCase | None":
        model = resolve(name).model
        if model is None:
            return None
        try:
            architecture = architecture_from_config(model_config(model).values)
            other = replace(self, architecture=architecture, model=name)
            tried = other.stored_as(self.format)
            tried.terms(self.workload)
        except UmaError:
            return None
        return tried

    def _largest_buffer(self, terms: Sequence[MemoryTerm]) -> int | None:
        """llama.cpp allocates weights, cache and graph whole, each as one buffer on a device."""
        if self.engine != "llama.cpp":
            return None
        whole = [t.size_bytes for t in terms if t.name in ("weights", "kv_cache", "activations")]
        return -(-max(whole) // max(1, len(self.machine.devices)))


def engine_case(
    architecture: Architecture,
    engine: Engine,
    quant: str | None,
    workload: Inference,
    budget: Budget,
    machine: Machine,
    options: Mapping[str, Any] = MappingProxyType({}),
    model: str | None = None,
    file: "GGUFHeader | None" = None,
) -> EngineCase:
    """The case of an engine with the weights in format ``quant``, by default its usual one.

    ``options`` are fields of the engine's own settings, ``file`` is what llama.cpp would load.
    What the machine decides is added: layers of a machine without a card stay on the host, and a
    card holds the process's context.

    Raises:
        UnknownName: If the engine has no such format.
        UsageError: If it cannot do what the workload asks, or does not run on the machine.
    """
    rules = rules_of(engine)
    quant = quant or DEFAULT_FORMATS[engine]
    if engine == "llama.cpp":
        quant = rules.mix_named(quant)
        settings = replace(rules.LlamaCpp(**options), **_placement(machine))
    else:
        settings = rules.Settings(**options)
    if engine == "transformers":
        rules.require_attention(architecture, settings)
        settings = replace(settings, num_devices=max(1, len(machine.devices)))
    budget = budget_under(engine, budget, machine, settings)
    weights = MemoryTerm("weights", 0, "exact", "not known yet")
    case = EngineCase(
        architecture, engine, quant, workload, budget, machine, settings, weights, 0, model
    )
    return case.stored_as(quant) if file is None else case.stored_in(file)


def budget_under(engine: Engine, budget: Budget, machine: Machine, settings: Any = None) -> Budget:
    """What of ``budget`` the engine uses: vLLM of a card no more than its settings reserve.

    Raises:
        UsageError: If the engine's memory is not known on the machine.
    """
    if engine != "llama.cpp" and machine.backend == "metal":
        raise UsageError(
            f"--engine {engine}: its memory is known on CUDA cards, not on {machine.name}; leave "
            "--engine out for mlx, or name a machine with a card"
        )
    if engine != "vllm" or machine.kind != "discrete":
        return budget
    rules = rules_of(engine)
    return _within(budget, rules.reserved_bytes(machine.memory_bytes, settings or rules.DEFAULTS))


def _within(budget: Budget, reserved_bytes: int) -> Budget:
    """``budget`` within the part of a card that vLLM reserves, which is all that it uses."""
    if reserved_bytes >= budget.budget_bytes:
        return replace(budget, limit_bytes=min(budget.limit_bytes, reserved_bytes))
    winner = "the part that gpu_memory_utilization reserves"
    return replace(
        budget,
        limit_bytes=min(budget.limit_bytes, reserved_bytes),
        budget_bytes=reserved_bytes,
        winner=winner,
        user=False,
        lines=(*budget.lines, (winner, reserved_bytes)),
    )


def _placement(machine: Machine) -> dict[str, int]:
    if machine.kind == "discrete":
        return {"num_devices": len(machine.devices), "runtime_context_bytes": LLAMA_CPP_CONTEXT}
    return {"n_gpu_layers": 0} if machine.kind == "host" else {}


def _context_term(size_bytes: int) -> MemoryTerm:
    source = "unaccounted of three RTX 4090, llama.cpp pull request 15860"
    return MemoryTerm("runtime_context", size_bytes, "fitted", source)


def rules_of(engine: Engine) -> Any:
    """The module of an engine's rules, all with the same functions, imported when it is asked for.

    MLX has none here: its plan is that of ``uma run``.
    """
    return import_module(f"uma.engines.{engine.replace('.', '_')}")
