"""What the engines transformers and vllm predict for a row."""

import re
from dataclasses import replace

from uma.checkpoint.free_names import NamedFormat
from uma.engines import transformers, vllm
from uma.errors import UnknownName
from uma.ledger import peak, phase_totals
from uma.memory.term import MemoryTerm
from uma.workload import Inference

from .rows import FORMAT, INCOMPLETE, Row, Skipped, Subject, cards_of, number, tokens_of

OUTSIDE_TORCH = ("runtime_context", "buffer_pool")  # what max_memory_allocated does not count


def allocated_bytes(row: Row, subject: Subject, group: str) -> int:
    """What torch counts as allocated: the peak, or in decode alone where that was measured.

    Raises:
        Skipped: If the row's format is not told, or none of the engine's.
    """
    inside = (term for term in _terms(row, subject) if term.name not in OUTSIDE_TORCH)
    totals = phase_totals(inside)
    return totals["decode"] if group.endswith("decode") else max(totals.values())


def device_bytes(row: Row, subject: Subject, group: str) -> int:
    """What a process holds on its cards.

    Raises:
        Skipped: If the row's format is not told, or none of the engine's.
    """
    return peak(_terms(row, subject))[1]


def _terms(row: Row, subject: Subject) -> tuple[MemoryTerm, ...]:
    quant = quant_name(subject.format)
    try:
        weights = transformers.weights_term(subject.architecture, quant)
    except UnknownName as error:
        raise Skipped(FORMAT) from error
    prompt, context = tokens_of(row)
    return transformers.inference_terms(
        subject.architecture, weights, _workload(row, prompt, context), _settings(row, quant)
    )


def quant_name(named: NamedFormat | None) -> str:
    """The format in the engine's words.

    Raises:
        Skipped: If none is told, or only a width.
    """
    if named is None:
        raise Skipped(INCOMPLETE)
    if named.scheme == "float":
        return named.name
    if named.scheme == "gptq":
        return "gptq-int8" if named.bits == 8 else "gptq"
    if named.scheme == "compressed-tensors":
        return named.name
    if named.scheme == "awq" and named.bits not in (None, 4):
        raise Skipped(FORMAT)
    if named.scheme in ("awq", "nf4", "int8", "fp8", "mxfp4"):
        return named.scheme
    raise Skipped(FORMAT)


def _workload(row: Row, prompt: int, context: int) -> Inference:
    return Inference(
        context_tokens=context, prompt_tokens=prompt, batch_size=number(row["batch"]) or 1
    )


def _settings(row: Row, quant: str) -> transformers.Settings:
    """The defaults of the version that ran. AutoGPTQ and AutoAWQ kernels compute in float16."""
    settings = transformers.Settings(
        dtype="float32" if quant == "float32" else "bfloat16",
        attn_implementation="flash_attention_2" if row["flash_attn"] == "1" else "sdpa",
        own_head=quant == "awq",
        num_devices=cards_of(row),
    )
    version = re.match(r"\d+\.\d+", row["engine_version"])
    return transformers.settings_of(version[0], settings) if version else settings


def vllm_weights_of_card(row: Row, subject: Subject, group: str) -> int:
    """vLLM's weights on one of its cards, split evenly.

    Raises:
        Skipped: If the row's format is not told, or none of the engine's.
    """
    try:
        weights = vllm.weights_term(subject.architecture, quant_name(subject.format))
    except UnknownName as error:
        raise Skipped(FORMAT) from error
    return weights.size_bytes // cards_of(row)


def vllm_needed_bytes(row: Row, subject: Subject, group: str) -> int:
    """What a device must have for vLLM to hold one sequence of the row's context.

    Raises:
        Skipped: If the row's format or lengths are not told.
    """
    weights = vllm.weights_term(subject.architecture, quant_name(subject.format))
    context = number(row["ctx_alloc"]) or tokens_of(row)[1]
    settings = vllm.Settings(gpu_memory_utilization=0.9)
    if row["source_date"][:4] < "2025":
        # V0 profiled whole prompts (vllm 0.6, config.py, SchedulerConfig).
        settings = replace(settings, max_num_batched_tokens=max(2048, context))
    terms = vllm.inference_terms(
        subject.architecture, weights, Inference(context_tokens=context), settings
    )
    return round(peak(terms)[1] / settings.gpu_memory_utilization)
