"""One model on one machine under one engine: terms, verdict, and what else would fit."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import Any

from uma.architecture.layers import Architecture
from uma.errors import UsageError
from uma.ledger import Ledger, peak
from uma.machine import Budget, Machine, verdict
from uma.memory.kv_cache import STEP
from uma.memory.term import MemoryTerm
from uma.plan.inference import InferencePlan, mlx_terms
from uma.workload import Engine, Inference

LONGEST_CONTEXT_TOKENS = 1 << 20  # tried for models that state no maximum

DEFAULT_FORMATS: dict[Engine, str] = {
    "llama.cpp": "Q4_K_M",
    "transformers": "bf16",
    "vllm": "bf16",
}

Terms = Callable[[Inference], tuple[MemoryTerm, ...]]

# What ``--bits`` means in each engine's own words, the usual format of that width.
BITS: dict[Engine, dict[int, str]] = {
    "llama.cpp": {
        2: "Q2_K",
        3: "Q3_K_M",
        4: "Q4_K_M",
        5: "Q5_K_M",
        6: "Q6_K",
        8: "Q8_0",
        16: "F16",
    },
    "transformers": {4: "nf4", 8: "int8", 16: "bf16"},
    "vllm": {4: "awq", 8: "fp8", 16: "bf16"},
}


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one model needs on one machine. ``format`` is that of the weights."""

    architecture: Architecture
    machine: Machine
    engine: Engine
    format: str
    workload: Inference
    budget: Budget
    ledger: Ledger
    max_context_tokens: int | None
    largest_buffer_bytes: int | None
    notes: tuple[str, ...] = ()

    @property
    def headroom_bytes(self) -> int:
        """What the budget leaves; below 0 where it is not enough."""
        return self.budget.budget_bytes - self.ledger.predicted_peak_bytes


def default_engine(machine: Machine) -> Engine:
    """MLX on Apple machines, llama.cpp elsewhere."""
    return "mlx" if machine.backend == "metal" else "llama.cpp"


def estimate_of_plan(plan: InferencePlan) -> Estimate:
    """What ``uma run`` has planned, as an estimate: the same terms."""
    terms = partial(mlx_terms, plan)
    return Estimate(
        architecture=plan.architecture,
        machine=plan.machine,
        engine="mlx",
        format=plan.form.name,
        workload=plan.workload,
        budget=plan.budget,
        ledger=plan.ledger,
        max_context_tokens=largest_context(terms, plan.workload, plan.architecture, plan.budget),
        largest_buffer_bytes=plan.largest_buffer_bytes,
        notes=plan.notes,
    )


def format_of_bits(engine: Engine, bits: int) -> str:
    """The usual format of ``bits`` bits in the engine's own words.

    Raises:
        UsageError: If the engine has none.
    """
    formats = BITS[engine]
    if bits not in formats:
        known = ", ".join(f"{width} ({name})" for width, name in formats.items())
        raise UsageError(f"--bits {bits}: {engine} has {known}; or name a format with --quant")
    return formats[bits]


def rules_of(engine: Engine) -> Any:
    """The module of an engine's rules, all with the same functions, imported when it is asked for.

    MLX has none here: its plan is that of ``uma run``.
    """
    return import_module(f"uma.engines.{engine.replace('.', '_')}")


def estimate_of_engine(
    architecture: Architecture,
    engine: Engine,
    quant: str | None,
    workload: Inference,
    budget: Budget,
    *,
    machine: Machine,
    llama: Mapping[str, Any] = MappingProxyType({}),
) -> Estimate:
    """The estimate under llama.cpp, transformers or vLLM with the weights in format ``quant``.

    ``llama`` are fields of ``LlamaCpp``, llama.cpp's options.

    Raises:
        UnknownName: If the engine has no such format.
        UsageError: If it cannot do what the workload asks.
    """
    rules = rules_of(engine)
    quant = quant or DEFAULT_FORMATS[engine]
    weights = rules.weights_term(architecture, quant)
    settings = {"settings": rules.LlamaCpp(**llama)} if engine == "llama.cpp" else {}

    def terms(workload: Inference) -> tuple[MemoryTerm, ...]:
        found: tuple[MemoryTerm, ...] = rules.inference_terms(
            architecture, weights, workload, **settings
        )
        return found

    found = terms(workload)
    result = verdict(peak(found)[1], budget)
    return Estimate(
        architecture=architecture,
        machine=machine,
        engine=engine,
        format=quant,
        workload=workload,
        budget=budget,
        ledger=Ledger(found, budget.budget_bytes, budget.limit_bytes, result),
        max_context_tokens=largest_context(terms, workload, architecture, budget),
        largest_buffer_bytes=None,
        notes=getattr(rules, "notes", lambda _: ())(architecture),
    )


def largest_context(
    terms: Terms, workload: Inference, architecture: Architecture, budget: Budget
) -> int | None:
    """The longest context, in whole steps of 256 tokens, within the budget; ``None`` for none.

    At most the model's maximum. Terms never shrink with the context, so halving finds it.
    """
    longest = architecture.max_position_embeddings or LONGEST_CONTEXT_TOKENS

    def fits(tokens: int) -> bool:
        tried = replace(workload, context_tokens=tokens, prompt_tokens=None)
        return peak(terms(tried))[1] <= budget.budget_bytes

    if fits(longest):
        return longest
    low, high = 0, longest // STEP
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle * STEP) else (low, middle - 1)
    return low * STEP or None
