"""`uma estimate` under MLX: more context never needs less, so the largest that fits is that."""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from uma.checkpoint.source import locate
from uma.engines.mlx import inference_terms
from uma.ledger import peak
from uma.machine import Machine
from uma.machine.named import described_machine, machine_named
from uma.plan.inference import Case, Request
from uma.plan.inverses import largest_context
from uma.plan.mlx_case import MlxCase, mlx_case
from uma.units import GIB
from uma.workload import Inference

# Sliding windows, latents, experts, recurrent layers, wide and narrow heads, many and few layers.
MODELS = [
    "gemma-3-27b",
    "gemma-3-12b",
    "llama-3.1-8b",
    "deepseek-v2-lite",
    "qwen3-30b-a3b",
    "qwen2.5-3b",
    "gpt-oss-20b",
    "gemma-2-9b",
    "nemotron-nano-9b-v2",
    "smollm2-1.7b",
]
STEPS = [64, 100, 128, 512, 1000, 2048, 4096]
MACHINES = ["macbook-air-m2-16", "24", "32", "m4 max 64"]


@cache
def case_of(model: str, bits: int = 4, kv_bits: int | None = None) -> MlxCase:
    mac = machine_named("m4 max 64")
    return mlx_case(locate(model, bits=bits), mac, Request(context_tokens=8192, kv_bits=kv_bits))


@cache
def _on_cpu(model: str, kv_bits: int | None) -> Case:
    case = case_of(model, kv_bits=kv_bits).cases[-1]
    return Case(case.architecture, case.form, "cpu")


def machine(name: str) -> Machine:
    return described_machine(int(name) * GIB) if name.isdigit() else machine_named(name)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(MODELS),
    st.sampled_from(STEPS),
    st.sampled_from([None, 8]),
    st.sampled_from(["metal", "cpu"]),
    st.lists(st.integers(1, 140_000) | st.integers(1, 9_000), min_size=2, max_size=6),
)
def test_more_context_never_needs_less_in_either_phase(
    model: str, step: int, kv_bits: int | None, backend: str, contexts: list[int]
) -> None:
    known = case_of(model, kv_bits=kv_bits).cases[-1]
    case = _on_cpu(model, kv_bits) if backend == "cpu" else known
    found = []
    for tokens in sorted(contexts):
        terms = case.terms(Inference(tokens, prefill_step_size=step, kv_bits=kv_bits))
        found.append(
            tuple(
                sum(t.size_bytes for t in terms if t.phase in ("always", phase))
                for phase in ("prefill", "decode")
            )
        )
    for phase in zip(*found, strict=True):
        assert list(phase) == sorted(phase)


@pytest.mark.parametrize(
    ("model", "step", "shorter", "longer"),
    [
        ("gemma-3-27b", 2048, 4096, 4100),
        ("gemma-3-12b", 64, 4096, 4097),
        ("deepseek-v2-lite", 2048, 4097, 4608),
        ("gemma-3-27b", 2048, 8192, 8193),
        ("llama-3.1-8b", 2048, 2048, 2049),
    ],
)
def test_a_last_chunk_of_a_few_tokens_does_not_make_a_context_need_less(
    model: str, step: int, shorter: int, longer: int
) -> None:
    case = case_of(model)
    needs = [
        case.excess_bytes(Inference(tokens, prefill_step_size=step), 0)
        for tokens in (shorter, longer)
    ]
    terms = [case.cases[-1].terms(Inference(n, prefill_step_size=step)) for n in (shorter, longer)]
    assert needs == sorted(needs)
    assert peak(terms[0])[1] <= peak(terms[1])[1]


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(MODELS),
    st.sampled_from(MACHINES),
    st.sampled_from([None, 8, 4]),
    st.data(),
)
def test_every_context_up_to_the_largest_that_fits_fits(
    model: str, name: str, kv_bits: int | None, data: st.DataObject
) -> None:
    case = case_of(model, kv_bits=kv_bits).on(machine(name))
    longest = largest_context(case)
    if longest is None:
        assert _verdict(case, 256) != "fits"
        return
    tried = data.draw(st.lists(st.integers(1, longest), min_size=4, max_size=4))
    near = [
        n for n in (longest, longest - 1, longest - 128, longest - 256, longest - 1000) if n > 0
    ]
    assert {n: _verdict(case, n) for n in (*tried, *near)} == dict.fromkeys((*tried, *near), "fits")
    if longest != case.architecture.max_position_embeddings:
        assert _verdict(case, longest + 256) != "fits"


def _verdict(case: MlxCase, tokens: int) -> str:
    request = replace(case.request, context_tokens=tokens)
    return replace(case, request=request).plan().verdict


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(MODELS),
    st.sampled_from([64, 512, 2048]),
    st.integers(65, 40_000),
    st.integers(1, 100),
)
def test_no_prompt_within_a_context_needs_more(
    model: str, step: int, tokens: int, percent: int
) -> None:
    """By 4 %: between the lengths that are worked out a command buffer may hold a little more."""
    case = case_of(model).cases[-1]
    prompt = max(2, tokens * percent // 100)
    within = Inference(tokens, prefill_step_size=step)
    told = peak(case.terms(within))[1]
    given_prompt = replace(within, prompt_tokens=prompt, context_tokens=prompt)
    assert peak(case.terms(given_prompt))[1] <= 1.04 * told


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(MODELS), st.sampled_from([512, 2048]), st.integers(0, 16))
def test_what_was_worked_out_before_changes_nothing(model: str, step: int, doublings: int) -> None:
    case = case_of(model).cases[-1]
    workload = Inference(3 << doublings, prefill_step_size=step)
    alone = inference_terms(case.architecture, case.form.weights, workload)
    assert case.terms(workload)[: len(alone)] == alone
