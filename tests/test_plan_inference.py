"""The choices of a plan, on machines that are not this one."""

from dataclasses import replace

import pytest

from uma.architecture import architecture_from_config
from uma.catalog import find_model, model_config
from uma.checkpoint.source import locate
from uma.ledger import phase_totals
from uma.machine import Machine
from uma.plan.advice import advice
from uma.plan.forms import by_speed, forms_of
from uma.plan.inference import InferencePlan, Request, plan_inference
from uma.units import GIB


def mac(memory_gib: int, limit_gib: float, **more: object) -> Machine:
    facts = Machine(
        name=f"Mac, {memory_gib} GiB",
        kind="unified",
        backend="metal",
        memory_bytes=memory_gib * GIB,
        limit_bytes=int(limit_gib * GIB),
        limit_source="test",
        os="macOS",
        os_version="26.0",
    )
    return replace(facts, **more)  # type: ignore[arg-type]


def planned(name: str, machine: Machine, bits: int = 4, **asked: object) -> InferencePlan:
    source = locate(name, bits=bits)
    assert source.config is not None
    architecture = architecture_from_config(source.config)
    forms = forms_of(source, architecture, bits=bits, backend=machine.backend)
    return plan_inference(architecture, forms, Request(**asked), machine)  # type: ignore[arg-type]


def test_the_default_context_is_the_models_maximum_when_that_fits() -> None:
    assert planned("llama-3-8b", mac(64, 48)).workload.context_tokens == 8192


def test_the_default_context_is_never_above_32768() -> None:
    plan = planned("qwen3-30b-a3b", mac(192, 147))
    assert plan.workload.context_tokens == 32_768


def test_the_default_context_shrinks_until_it_fits() -> None:
    roomy = planned("qwen3-30b-a3b", mac(192, 147))
    budget = roomy.active_peak_bytes - GIB
    plan = planned("qwen3-30b-a3b", mac(192, 147), budget_bytes=budget)
    assert plan.verdict == "fits"
    assert 0 < plan.workload.context_tokens < 32_768
    longer = planned(
        "qwen3-30b-a3b",
        mac(192, 147),
        budget_bytes=budget,
        prefill_step_size=plan.workload.prefill_step_size,
        context_tokens=plan.workload.context_tokens + 1024,
    )
    assert longer.workload.prefill_step_size < plan.workload.prefill_step_size or (
        longer.verdict == "exceeds"
    )


def test_an_asked_context_is_kept_and_the_step_lowered_until_it_fits() -> None:
    wide = planned("llama-3-8b", mac(64, 48), context_tokens=8192)
    budget = wide.active_peak_bytes - 1
    plan = planned("llama-3-8b", mac(64, 48), context_tokens=8192, budget_bytes=budget)
    assert plan.workload.context_tokens == 8192
    assert plan.workload.prefill_step_size < wide.workload.prefill_step_size
    assert plan.verdict == "fits"
    assert any("prefill step lowered" in note for note in plan.notes)


def test_a_14b_at_8k_on_a_16_gib_air_is_tight_and_not_refused() -> None:
    assert planned("qwen3-14b", mac(16, 11.84), context_tokens=8192).verdict == "tight"


def test_the_users_budget_refuses_what_the_device_would_take() -> None:
    plan = planned("llama-3-8b", mac(64, 48), context_tokens=4096, budget_bytes=GIB)
    assert plan.verdict == "exceeds"


def test_an_array_above_the_devices_maximum_lowers_the_step_or_exceeds() -> None:
    # B1: a single buffer is bounded on Metal, however much memory is free.
    free = planned("deepseek-v3", mac(512, 400), context_tokens=65_536)
    bounded = mac(512, 400, max_buffer_bytes=free.largest_buffer_bytes - 1)
    plan = planned("deepseek-v3", bounded, context_tokens=65_536)
    small_step = plan.workload.prefill_step_size < free.workload.prefill_step_size
    assert small_step or plan.verdict == "exceeds"
    assert planned("deepseek-v3", mac(512, 400, max_buffer_bytes=GIB)).verdict == "exceeds"


@pytest.mark.parametrize("name", ["llama-3-8b", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v3"])
def test_the_terms_of_each_phase_sum_to_what_the_verdict_is_held_against(name: str) -> None:
    plan = planned(name, mac(512, 400))
    pool = sum(t.size_bytes for t in plan.ledger.terms if t.name == "buffer_pool")
    assert max(phase_totals(plan.ledger.terms).values()) == plan.active_peak_bytes + pool
    assert plan.ledger.predicted_peak_bytes == plan.active_peak_bytes + pool


def test_what_fits_is_within_the_budget_even_with_the_pool() -> None:
    for limit in (6, 8, 12, 24):
        plan = planned("llama-3-8b", mac(32, limit))
        if plan.verdict == "fits":
            assert plan.ledger.predicted_peak_bytes <= plan.budget.budget_bytes


def test_advice_names_only_what_was_tried_and_would_run() -> None:
    source = locate("llama-3-70b", bits=8)
    plan = planned("llama-3-70b", mac(64, 48), bits=8)
    assert plan.verdict == "exceeds"
    lines = advice(plan, source)
    advised = next(line for line in lines if line.startswith("--bits"))
    bits = int(advised.split()[1])
    assert 4 <= bits < 8
    assert planned("llama-3-70b", mac(64, 48), bits=bits).verdict in ("fits", "tight")
    assert planned("llama-3-70b", mac(64, 48), bits=bits + 1 + (bits == 6)).verdict == "exceeds"


def test_a_preferred_form_never_shortens_the_context() -> None:
    box = Machine("box", "host", "cpu", 32 * GIB, 32 * GIB, "installed memory")
    plan = planned("llama-3-8b", box)
    assert (plan.workload.context_tokens, plan.workload.prefill_step_size) == (8192, 2048)
    assert plan.form.kind != "float32"


def test_a_catalog_config_and_its_name_plan_the_same_architecture() -> None:
    model = find_model("meta-llama/Meta-Llama-3-70B-Instruct")
    assert model is not None
    ours = architecture_from_config(model_config(model).values)
    assert ours.num_parameters == 70_553_706_496


@pytest.mark.parametrize(
    ("rates", "order"),
    [
        ({"stored": 9.0, "float32_scales": 3.0, "float32": 1.0}, "float32 float32_scales stored"),
        # The stored form stays first unless another is 1.2 times as fast.
        ({"stored": 1.1, "float32_scales": 3.0, "float32": 1.0}, "stored float32 float32_scales"),
        ({"stored": 1.3, "float32_scales": 3.0, "float32": 1.0}, "float32 stored float32_scales"),
        ({"float32": 1.0}, "float32"),  # what a backend cannot run is left out
    ],
)
def test_forms_are_ordered_by_what_the_backend_does_fastest(
    rates: dict[str, float], order: str
) -> None:
    source = locate("llama-3-8b", bits=4)
    assert source.config is not None
    architecture = architecture_from_config(source.config)
    forms = forms_of(source, architecture, backend="cpu")
    found = by_speed(forms, architecture, source.config, lambda *_, **__: rates)  # type: ignore[arg-type,return-value]
    assert [form.kind for form in found] == order.split()
