"""The model that is trained on machine after machine: what each way needs is worked out once."""

from collections.abc import Callable
from dataclasses import field, replace
from typing import Any, Literal, TypeVar, cast

from uma.architecture.layers import Architecture
from uma.checkpoint.source import ModelSource
from uma.engines.torch_model import Model, trained_elements, weights_bytes
from uma.errors import UsageError
from uma.frozen import dataclass
from uma.ledger import peak
from uma.machine import budget_of
from uma.memory.adapters import adapter_elements, mlx_adapters
from uma.memory.reads import WeightReads
from uma.memory.term import MemoryTerm
from uma.memory.weights import weight_bytes
from uma.plan.compare.candidates import Candidate
from uma.plan.compare.recipes import Kind, Recipe, torch_recipes
from uma.plan.training.case import TrainingCase
from uma.plan.training.checks import check_unpacked, reasons, without_bfloat16
from uma.plan.training.places import Places, places
from uma.plan.training.stacks import settings_for
from uma.plan.training.verdict import least_bytes
from uma.quantization import quantization_for, quantization_of_config
from uma.speed.stored import even_reads
from uma.workload import Place, TrainingWorkload

T = TypeVar("T")
_UNIT = 10**9  # bytes of weights; of a training only the numbers of elements matter


@dataclass(frozen=True, slots=True)
class TrainingSubject:
    """A model and how it is to be trained; what was computed for one machine serves the next.

    Raises:
        UsageError: If nothing trains such a model.
    """

    source: ModelSource
    architecture: Architecture
    workload: TrainingWorkload
    kind: Kind
    known: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_unpacked(self.architecture)

    @property
    def stored_bits(self) -> int | None:
        """The only width that MLX has the weights in, if that is so; GGUF can be dequantized."""
        stored = quantization_of_config(self.source.config or {})
        if stored is None or (self.kind == "full" and self.source.kind in ("gguf", "default")):
            return None
        return stored.default.bits

    def trained_elements(self, recipe: Recipe) -> int:
        """Of all weights, or of the adapters that the program of ``recipe`` makes."""
        if self.workload.method == "full":
            return self.architecture.num_parameters

        def make() -> int:
            if recipe.engine == "mlx":
                return adapter_elements(self.architecture, self.workload)
            settings = settings_for(recipe.stack, recipe.workload, self.architecture)
            return trained_elements(Model(self.architecture, recipe.workload, settings))

        return self._once(("trained", recipe.engine), make)

    @property
    def has_form(self) -> bool:
        """Whether mlx-lm has adapters of this kind for all matrices."""
        return self._once("form", self._has_form)

    def _has_form(self) -> bool:
        try:
            list(mlx_adapters(self.architecture, self.workload))
        except UsageError:
            return False
        return True

    @property
    def reads(self) -> WeightReads:
        return self._once("reads", lambda: even_reads(self.architecture, _UNIT))

    def torch_recipes(self, candidate: Candidate, places: tuple[Place, ...]) -> tuple[Recipe, ...]:
        """PyTorch's on the cards of ``candidate`` that a program has, in the 16 bits of the cards.

        ``places`` are those to offload to.
        """
        devices = max(1, len(candidate.machine.devices))
        half: Literal["float16", "bfloat16"] = "bfloat16"
        if any(without_bfloat16(candidate.machine)):
            half = "float16"

        def make() -> tuple[Recipe, ...]:
            asked = replace(self.workload, dtype=half)
            found = torch_recipes(asked, self.kind, devices, places)
            return tuple(one for one in found if not any(reasons(self.case(one, candidate))))

        return self._once(("recipes", half, devices, places), make)

    def case(self, recipe: Recipe, candidate: Candidate) -> TrainingCase:
        machine = candidate.machine
        return TrainingCase(
            self.architecture,
            machine,
            budget_of(machine),
            recipe.engine,
            recipe.workload,
            self._weights(recipe.bits) if recipe.engine == "mlx" else None,
            trainer="uma" if recipe.own else "mlx_lm",
            stack=recipe.stack,
        )

    def needed_bytes(self, case: TrainingCase) -> tuple[int, int]:
        """What each device holds at the worst moment, and without the pool of freed blocks.

        What MLX computes does not depend on how many bits quantized weights have.
        """
        asked, weights = case.workload, 0
        if case.weights is not None:
            weights = case.weights.size_bytes
            asked = replace(asked, quantized="quantized" if asked.quantized else "")

        def make() -> tuple[int, int]:
            terms = case.terms()
            return peak(terms)[1] - weights, least_bytes(terms) - weights

        key = (asked, case.stack, case.trainer, case.machine.backend)
        most, least = self._once(key, make)
        return most + weights, least + weights

    def places(self, case: TrainingCase) -> Places:
        return self._once(("places", case.workload, case.stack), lambda: places(case))

    def weights_bytes(self, case: TrainingCase) -> int:
        """Of the whole model, as it is held."""
        if case.weights is not None:
            return case.weights.size_bytes
        key = ("weights", case.workload.quantized, case.stack)
        return self._once(key, lambda: weights_bytes(case.torch_model))

    def _weights(self, bits: int) -> MemoryTerm:
        def make() -> MemoryTerm:
            return weight_bytes(self.architecture, quantization_for(bits))

        return self._once(("weights", bits), make)

    def _once(self, key: Any, make: Callable[[], T]) -> T:
        if key not in self.known:
            self.known[key] = make()
        return cast(T, self.known[key])
