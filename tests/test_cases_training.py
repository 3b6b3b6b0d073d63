"""What people hit in training, as tests of the estimator (cases E1 to E23, and H12).

A case is named by its number in the collection that this project was begun with; the line under a
test says what the public thread says. ``COVERED`` names the tests of training itself that answer a
case.
"""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from test_plan_training import ALL, case_on

from uma.architecture import architecture_from_config
from uma.catalog import model_config
from uma.checkpoint.free_names import find_free
from uma.dataset.lengths import Lengths
from uma.engines.torch_model import Settings
from uma.engines.torch_training import training_terms
from uma.errors import UsageError
from uma.ledger import peak, phase_totals
from uma.machine import budget_of
from uma.machine.here import machine_of
from uma.plan.training.data import with_worst_batch
from uma.plan.training.estimate import TrainingEstimate, training_estimate
from uma.report.training import training_text
from uma.units import GB, GIB
from uma.workload import TrainingWorkload

TESTS = Path(__file__).parent
STUDIO = "mac-studio-m2-ultra-192"
CASES = [*(f"E{n}" for n in range(1, 24)), "H12"]

COVERED = {
    "E2": "test_lora_plan.py::test_rows_of_any_length_come_in_few_shapes",
    "E6": "test_lora_step.py::test_loss_and_gradients_are_those_of_the_whole_model",
    "E7": "test_lora_run.py::"
    "test_a_gradient_that_is_not_finite_is_named_with_the_lines_of_its_pass",
    "E8": "test_cases_lora.py::test_a_row_that_loses_every_answer_is_dropped",
    "E9": "test_cases_lora.py::test_every_answer_of_a_chat_is_supervised",
    "E11": "test_lora_step.py::test_any_shape_mask_and_slice_gives_the_same",
    "E12": "test_lora_run.py::test_a_resumed_run_ends_bit_for_bit_where_an_unbroken_one_does",
    "E13": "test_cases_lora.py::test_an_adapter_is_all_that_trains",
    "E14": "test_cases_lora.py::test_another_adapter_is_refused_with_what_differs",
    "E16": "test_lora_step.py::test_a_model_of_16_bits_trains_in_them_and_its_adapter_in_float32",
    "E18": "test_machine.py::test_the_pool_gives_way_where_the_budget_ends",
    "E21": "test_measure_diagnosis.py::test_a_reported_state_is_found_with_its_evidence",
}


def needed_with_measures(found: TrainingEstimate) -> int:
    """What a device needs with all measures."""
    return found.ledger.predicted_peak_bytes - sum(one.saves_bytes for one in found.measures)


def test_every_case_is_tested_here_or_where_it_is_said_to_be() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    here = set(re.findall(r'^    """([EH]\d+)[,:]', text, re.MULTILINE))
    assert {*COVERED, *here} == set(CASES)
    for case, place in COVERED.items():
        file, _, name = place.partition("::")
        assert f"def {name}(" in (TESTS / file).read_text(encoding="utf-8"), case


def test_the_longest_row_of_a_data_set_decides_before_the_first_step() -> None:
    """E1: an 8B with rows of up to 19,453 tokens, cut to 8,192, took a 128 GB Mac down."""
    case = case_on("macbook-pro-16-m3-max-128", "llama-3-8b", max_seq_length=8192)
    rows = Lengths((300,) * 40 + (19_453,) + (300,) * 3, tuple(range(1, 45)))
    worst, data = with_worst_batch(case, rows)
    found = training_estimate(worst, data)
    assert found.ledger.verdict == "exceeds"
    assert (data.rows, data.tokens, rows.longest_line) == (4, 8192, 41)
    short, _ = with_worst_batch(case, Lengths((300,) * 44, tuple(range(1, 45))))
    assert training_estimate(short).ledger.verdict == "fits"


def test_what_makes_it_fit_is_proposed_with_batch_length_and_checkpointing() -> None:
    """E1: refuse, or propose what fits."""
    case = case_on("macbook-pro-16-m3-max-128", "llama-3-8b", max_seq_length=8192)
    found = training_estimate(case)
    assert found.largest["max_seq_length"] is not None
    assert found.measures
    assert needed_with_measures(found) <= case.room_bytes


def test_truncation_is_explained_apart_from_memory() -> None:
    """E3: "consider pre-splitting your data" was read as the reason of a crash."""
    case = case_on("mac-studio-m2-ultra-192", "llama-3.2-1b", 4)
    worst, data = with_worst_batch(case, Lengths((100, 90, 80, 5000), (1, 2, 3, 4)))
    found = training_estimate(worst, data)
    assert found.ledger.verdict == "fits"
    assert "1 row is longer than 2,048 tokens and is cut" in training_text(found, "llama")


def test_a_7b_in_16_bits_exceeds_a_mac_of_16_gb_and_says_by_how_much() -> None:
    """E3: 7B on 16 to 32 GB: a panic instead of an answer."""
    found = training_estimate(case_on("macbook-pro-14-m1-pro-16", "llama-2-7b-hf", batch_size=1))
    assert found.ledger.verdict == "exceeds"
    assert "too much" in training_text(found, "llama-2-7b-hf")


def test_unfused_attention_is_quadratic_without_checkpointing() -> None:
    """E4: a 1B at 4,096 tokens and batch 4 needs tens of gigabytes."""
    long = case_on(STUDIO, "llama-3.2-1b", max_seq_length=4096)
    short = case_on(STUDIO, "llama-3.2-1b", max_seq_length=2048)
    assert long.needed_bytes() > 60 * GB
    assert long.needed_bytes() > 2.5 * short.needed_bytes()


def test_a_step_in_slices_is_offered_with_its_cost() -> None:
    """E4: 69.8 GB became 19.7 with the sequence in chunks."""
    found = training_estimate(
        case_on("macbook-pro-16-m3-max-64", "llama-3.2-1b", max_seq_length=4096)
    )
    assert found.ledger.verdict == "exceeds"
    (measure,) = found.measures
    assert measure.options == ("--trainer", "uma")
    assert measure.cost
    assert needed_with_measures(found) < 19.7 * GB


def test_recurrent_layers_keep_states_of_every_token() -> None:
    """E5: one layer of Qwen3.5 took 4.3, 10.2, 31.4 and 108 GB at 512 to 4,096 tokens.

    That was the layer alone, not compiled. mlx_lm compiles its step, in which more gradients of
    whole sequences are alive at once (measured on the CPU: tests/data/training_memory_mlx.json).
    """
    measured = {512: 4.3, 1024: 10.2, 2048: 31.4, 4096: 108}
    for tokens, gigabytes in measured.items():
        asked = {"batch_size": 1, "max_seq_length": tokens}
        one, two = (
            case_on(STUDIO, "qwen3.5-9b", 4, num_layers=n, **asked).needed_bytes() for n in (1, 2)
        )
        layer = (two - one) / GB  # the last is attention, the one before it is recurrent
        assert 0.9 * gigabytes < layer < 3.5 * gigabytes
    found = training_estimate(case_on(STUDIO, "qwen3.5-9b", 4, batch_size=1, num_layers=2))
    assert any("states of gated_delta layers" in note for note in found.notes)


def test_hybrid_layers_are_not_priced_as_dense_ones() -> None:
    """E5: a dense formula said 36 GB would do."""
    hybrid = case_on(STUDIO, "qwen3.5-9b", 4, batch_size=1, num_layers=4)
    dense = case_on(STUDIO, "qwen3-8b", 4, batch_size=1, num_layers=4)
    assert hybrid.needed_bytes() > 3 * dense.needed_bytes()


def test_validation_needs_less_than_training_of_the_same_batch() -> None:
    """E10: validation looked hung, and needed more than training."""
    found = training_estimate(case_on(STUDIO, "llama-3-8b", 4))
    totals = phase_totals(found.ledger.terms)
    assert 0 < totals["validation"] < totals["backward"]


@pytest.mark.parametrize("machine", [STUDIO, "rtx-4090"])
def test_dora_is_priced_higher_than_lora(machine: str) -> None:
    """E15: twice the activations of LoRA, on both stacks."""
    asked = {"batch_size": 1, "max_seq_length": 1024, "grad_checkpoint": 1, **ALL}
    lora, dora = (
        case_on(machine, "llama-3.2-3b", method=method, **asked) for method in ("lora", "dora")
    )
    assert dora.needed_bytes() > lora.needed_bytes()


@pytest.mark.parametrize("bits", [3, 6])
def test_dora_on_bits_that_mlx_lm_cannot_is_refused_by_their_name(bits: int) -> None:
    """E17: an integer division made it crash on 6 bits."""
    case = case_on(STUDIO, "llama-3.2-1b", bits, method="dora", quantized=f"{bits} bits")
    with pytest.raises(UsageError, match=f"wrong for {bits} bits"):
        training_estimate(case)


def test_logits_of_a_large_vocabulary_are_a_term_that_slices_remove() -> None:
    """E19: 16,384 tokens of 248k: 47.6 GB with all logits, 3.1 fused."""
    architecture = architecture_from_config(model_config(find_free("qwen3.5-4b")).values)
    sizes = {}
    for loss in ("naive", "sliced"):
        workload = TrainingWorkload(
            num_layers=None,
            batch_size=1,
            max_seq_length=16384,
            grad_checkpoint=1,
            optimizer="adamw",
            loss=loss,  # type: ignore[arg-type]
        )
        terms = training_terms(architecture, workload, Settings())
        sizes[loss] = sum(t.size_bytes for t in terms if t.name == "logits")
    assert sizes["naive"] > 0.7 * 47.6 * GB
    assert sizes["sliced"] < 3.1 * GB


def test_a_sliced_loss_is_proposed_where_logits_are_what_is_too_much() -> None:
    """E19: a chunked loss where the logits are the largest term."""
    case = case_on(
        "rtx-4090", "qwen3-4b", batch_size=3, max_seq_length=4096, grad_checkpoint=1, **ALL
    )
    found = training_estimate(case)
    assert [measure.name for measure in found.measures] == ["loss in slices"]


def test_training_has_the_budget_of_everything_else() -> None:
    """E20: a method chosen from a number that the allocator could not give."""
    machine = machine_of(STUDIO)
    found = training_estimate(case_on(STUDIO, "llama-3-8b", 4))
    budget = budget_of(machine)
    assert (found.ledger.budget_bytes, found.ledger.limit_bytes) == (
        budget.budget_bytes,
        budget.limit_bytes,
    )
    assert found.case.room_bytes == budget.limit_bytes


def test_saving_takes_nothing_beside_what_is_there() -> None:
    """E22: 45 to 67 GB became 120 when a checkpoint was saved; adapters alone are written."""
    found = training_estimate(case_on(STUDIO, "llama-3-8b", 4))
    totals = phase_totals(found.ledger.terms)
    assert totals["save"] < totals["validation"] < totals["backward"]
    assert totals["save"] == sum(t.size_bytes for t in found.ledger.terms if t.phase == "always")


def test_a_1b_in_4_bits_trains_on_8_gb() -> None:
    """E23: "needs 16 GB" was said; no minimum but what is computed."""
    case = case_on(
        "mac-mini-m1-8", "llama-3.2-1b", 4, batch_size=1, max_seq_length=256, grad_checkpoint=1
    )
    assert training_estimate(case).ledger.verdict in ("fits", "tight")


def test_frozen_weights_are_not_counted_as_trained() -> None:
    """H12: DeepSpeed's estimator counted a LoRA's base as trained: 171 GB; 14.7 to 21.3 real."""
    case = case_on("a100-80gb", "llama-2-7b-hf", batch_size=1, grad_checkpoint=1, **ALL)
    size = peak(case.terms())[1]
    assert 14.7 * GB < size < 21.3 * GB


def test_frozen_trained_gradients_states_and_activations_are_rows_of_their_own() -> None:
    """H12: 0.49 GB said, about 20 used: activations were no row at all."""
    case = case_on("a100-80gb", "llama-2-7b-hf", batch_size=1, grad_checkpoint=1, **ALL)
    rows = {term.name for term in training_estimate(case).ledger.terms}
    assert rows >= {
        "weights",
        "adapters",
        "gradients",
        "optimizer_states",
        "activations",
        "logits",
    }
    held = next(t for t in case.terms() if t.name == "optimizer_states").size_bytes
    assert held == 8 * case.trainable_parameters < GIB


def test_a_larger_base_changes_no_optimizer_state() -> None:
    """H12: states follow what is trained."""
    small = case_on("a100-80gb", "llama-2-7b-hf", grad_checkpoint=1, **ALL)
    quantized = replace(small, workload=replace(small.workload, quantized="nf4"))
    states = [
        next(t.size_bytes for t in case.terms() if t.name == "optimizer_states")
        for case in (small, quantized)
    ]
    assert states[0] == states[1]
