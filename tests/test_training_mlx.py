"""The MLX engine against mlx-lm's own trainer, as ``bench_training_memory.py`` measured it."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from models import CONFIGS

from uma.architecture import architecture_from_config
from uma.catalog import model_config
from uma.checkpoint.free_names import find_free
from uma.engines import mlx_recurrent_layers
from uma.engines.mlx_compiled_update import updated
from uma.engines.mlx_lm_step import step_roots
from uma.engines.mlx_recurrent_layers import delta_rule
from uma.engines.mlx_training import Steps, training_terms
from uma.engines.mlx_updates import UPDATES
from uma.ledger import peak, phase_totals
from uma.memory import mlx_sample
from uma.memory.mlx_plan import family_of
from uma.memory.mlx_program import Program
from uma.memory.weights import weight_bytes
from uma.quantization import Quantization
from uma.workload import Method, TrainingWorkload

MEASURED = json.loads((Path(__file__).parent / "data/training_memory_mlx.json").read_text())["rows"]
EXACT_SLACK = 32  # bytes: two keys of the random state
PUBLISHED = [  # mlx-lm issue 47, mlx-tune's performance page: GB as printed, rounded
    ("mistral-7b-v0.1", Quantization(4, 64), 4, 1, 7500, 30),
    ("qwen3-0.6b", None, 16, 1, 4096, 18),
]


def config_of(row: dict[str, Any]) -> dict[str, Any]:
    config = CONFIGS[row["kind"]]
    return config | {"num_hidden_layers": row.get("layers", config["num_hidden_layers"])}


def predicted(row: dict[str, Any]) -> int:
    architecture = architecture_from_config(config_of(row))
    workload = TrainingWorkload(
        method=row["method"],
        rank=8,
        num_layers=None,
        batch_size=2,
        max_seq_length=row["length"],
        grad_checkpoint=int(row["checkpoint"]),
        dtype="float32",
    )
    weights = weight_bytes(architecture, None, 4)
    return peak(training_terms(architecture, weights, workload, backend="cpu"))[1]


def errors(rows: list[dict[str, Any]]) -> list[float]:
    return [abs(predicted(row) / row["peak_bytes"] - 1) for row in rows]


def test_what_is_there_before_the_first_step_is_exact() -> None:
    for row in MEASURED:
        architecture = architecture_from_config(config_of(row))
        workload = TrainingWorkload(method=row["method"], num_layers=None, dtype="float32")
        weights = weight_bytes(architecture, None, 4)
        terms = training_terms(architecture, weights, workload, backend="cpu")
        held = sum(t.size_bytes for t in terms if t.name in ("weights", "adapters"))
        assert 0 <= row["before_bytes"] - held <= EXACT_SLACK


def test_peaks_of_every_kind_of_layer_and_method_are_within_6_percent() -> None:
    found = errors([row for row in MEASURED if "layers" not in row])
    assert len(found) == 50
    assert median(found) < 0.01
    assert max(found) < 0.06


def test_peaks_of_8_to_24_layers_are_within_10_percent() -> None:
    found = errors([row for row in MEASURED if "layers" in row])
    assert len(found) == 44
    assert median(found) < 0.01
    assert max(found) < 0.1


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize(
    ("method", "layers", "length"), [("lora", 2, 97), ("full", 2, 97), ("full", 8, 129)]
)
def test_the_gated_delta_rule_needs_what_it_needs_when_laid_out_token_by_token(
    method: Method, layers: int, length: int, checkpoint: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def token_by_token(p: Program, sequences: Any, state: Any, _: Any) -> Any:
        return delta_rule(p, sequences, p.zeros(tuple(state), 4))[0]

    architecture = architecture_from_config(CONFIGS["hybrid"] | {"num_hidden_layers": layers})
    workload = TrainingWorkload(
        method=method,
        num_layers=None,
        batch_size=2,
        max_seq_length=length,
        grad_checkpoint=int(checkpoint),
        dtype="float32",
    )
    counted = Steps(architecture, workload, "cpu").step_bytes(layers)
    monkeypatch.setattr(mlx_recurrent_layers, "of_all_tokens", token_by_token)
    whole = Steps(architecture, workload, "cpu").step_bytes(layers)
    assert counted == pytest.approx(whole, rel=0.1)


def test_the_loss_on_metal_holds_one_array_of_logits_since_mlx_0_32_4() -> None:
    """Before there were two more: the softmax, and the scores' slope by all tokens."""
    architecture = architecture_from_config(model_config(find_free("qwen3-0.6b")).values)
    weights, logits = weight_bytes(architecture), 4095 * architecture.vocab_size * 2
    totals = [
        phase_totals(
            training_terms(
                architecture,
                weights,
                TrainingWorkload(num_layers=4, batch_size=1, max_seq_length=4096, loss=loss),
            )
        )["backward"]
        for loss in ("naive", "fused")
    ]
    assert totals[0] - totals[1] == pytest.approx(2 * logits, rel=0.03)


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row[0])
def test_peaks_on_metal_are_those_that_users_report(row: Any) -> None:
    name, form, layers, batch, length, gigabytes = row
    architecture = architecture_from_config(model_config(find_free(name)).values)
    workload = TrainingWorkload(num_layers=layers, batch_size=batch, max_seq_length=length)
    found = peak(training_terms(architecture, weight_bytes(architecture, form), workload))[1]
    assert found / 1e9 == pytest.approx(gigabytes, rel=0.08)


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("method", ["lora", "dora", "full"])
@pytest.mark.parametrize("name", ["smollm2-135m", "llama-3-8b", "gemma-3-4b", "qwen3-30b-a3b"])
def test_a_step_of_many_layers_needs_what_it_needs_when_all_are_laid_out(
    name: str, method: Method, checkpoint: bool
) -> None:
    if (name, method) == ("qwen3-30b-a3b", "dora"):
        pytest.skip("stacked experts have no DoRA")
    steps = steps_of(name, method=method, grad_checkpoint=int(checkpoint))
    assert len(steps.places) <= 7
    assert steps.peak_bytes() == pytest.approx(steps.step_bytes(len(steps.layers)), rel=0.01)


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [("llama-3-8b", 0.01), ("qwen2.5-7b", 0.01), ("qwen3-4b", 0.04), ("exaone-3.5-2.4b", 0.04)],
)
def test_a_checkpointed_step_of_16_layers_needs_what_it_needs_when_all_are_laid_out(
    name: str, tolerance: float
) -> None:
    """What is alive depends on how the arrays of all layers fall among those taken at once."""
    steps = steps_of(name, num_layers=16, grad_checkpoint=1, quantized="4bit", loss="fused")
    assert steps.peak_bytes() == pytest.approx(steps.step_bytes(16), rel=tolerance)


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
def test_gradients_wait_for_an_update_of_several_kernels(optimizer: str, checkpoint: bool) -> None:
    steps = steps_of(
        "mistral-7b-v0.1",
        method="full",
        optimizer=optimizer,
        grad_checkpoint=int(checkpoint),
        max_seq_length=512,
    )
    assert steps.peak_bytes() == pytest.approx(steps.step_bytes(32), rel=0.03)


def test_all_layers_are_laid_out_where_no_array_stands_between_two() -> None:
    """As that is made within a kernel."""
    architecture = architecture_from_config(model_config(find_free("granite-4.0-h-micro")).values)
    targets = ("gate_proj", "up_proj", "down_proj")
    workload = TrainingWorkload(num_layers=5, targets=targets, quantized="4bit", batch_size=4)
    steps = Steps(architecture, workload, "cpu")
    assert steps.left
    assert steps.peak_bytes() == steps.step_bytes(5)


def steps_of(name: str, **asked: Any) -> Steps:
    architecture = architecture_from_config(model_config(find_free(name)).values)
    workload = TrainingWorkload(**{"num_layers": None, **asked})
    return Steps(architecture, workload, "metal")


def test_layers_that_do_nothing_are_continued_too() -> None:
    """Nemotron's search for an architecture took attention or all of a layer away."""
    architecture = architecture_from_config(
        model_config(find_free("nvidia/Llama-3_1-Nemotron-Ultra-253B-v1")).values
    )
    workload = TrainingWorkload(method="full", num_layers=None, batch_size=1, max_seq_length=512)
    assert any(not layer.parameters for layer in architecture.layers)
    assert Steps(architecture, workload, "metal").peak_bytes() > 0


@pytest.mark.parametrize(("checkpoint", "tolerance"), [(False, 0.003), (True, 0.07)])
@pytest.mark.parametrize("method", ["lora", "dora", "full"])
@pytest.mark.parametrize("name", ["granite-4.0-h-micro", "falcon-h1-1.5b"])
def test_a_scan_of_many_chunks_needs_what_it_needs_when_all_are_laid_out(
    name: str,
    method: Method,
    checkpoint: bool,
    tolerance: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    architecture = architecture_from_config(model_config(find_free(name)).values)
    workload = TrainingWorkload(method=method, num_layers=None, grad_checkpoint=int(checkpoint))
    few = Steps(architecture, workload, "metal").peak_bytes()
    monkeypatch.setattr(mlx_recurrent_layers, "laid_out", lambda *_: 8)
    whole = Steps(architecture, workload, "metal").peak_bytes()
    assert few != whole
    assert few == pytest.approx(whole, rel=tolerance)


def test_scans_of_all_lengths_are_laid_out_and_ordered_once() -> None:
    architecture = architecture_from_config(model_config(find_free("granite-4.0-h-micro")).values)
    found = []
    for length in (2048, 4000, 65536):
        steps = Steps(architecture, TrainingWorkload(max_seq_length=length), "metal")
        steps.peak_bytes()
        family = steps.sample.family
        found.append((id(family), len(family.plans), len(family.courses)))
    assert found == found[:1] * 3


def test_a_step_does_not_depend_on_what_was_asked_before() -> None:
    """SmolLM2's modules hold ``down_proj`` first, Cohere's ``up_proj``; all else is alike."""
    asked = {"num_layers": 16, "grad_checkpoint": 1, "batch_size": 16, "max_seq_length": 4096}
    found = []
    for before in ([], ["smollm2-360m"]):
        mlx_sample._known.cache_clear()
        family_of.cache_clear()
        for name in before:
            steps_of(name, **asked).peak_bytes()
        found.append(steps_of("command-r", **asked).peak_bytes())
    assert found[0] == found[1]


@pytest.mark.parametrize("other", [{"batch_size": 1}, {"rank": 1}, {"rank": 16}])
def test_equal_dimensions_are_laid_out_with_others(other: dict[str, Any]) -> None:
    """Qwen3's experts of a token are 8, as the rank is."""
    steps = [steps_of("qwen3-30b-a3b", num_layers=16, **changes) for changes in ({}, other)]
    assert steps[0].sample.family is steps[1].sample.family
    mlx_sample._known.cache_clear()
    family_of.cache_clear()
    alone = steps_of("qwen3-30b-a3b", num_layers=16, **other)
    assert steps[1].peak_bytes() == alone.peak_bytes()


def test_accumulated_gradients_stay_between_steps() -> None:
    architecture = architecture_from_config(CONFIGS["full"])
    weights = weight_bytes(architecture, None, 4)
    totals = [
        phase_totals(
            training_terms(
                architecture,
                weights,
                TrainingWorkload(num_layers=None, grad_accumulation_steps=n),
                backend="cpu",
            )
        )["backward"]
        for n in (1, 4)
    ]
    adapters = 8 * sum(
        sum(p.shape)
        for layer in architecture.layers
        for p in layer.parameters
        if p.kind == "matrix"
    )
    assert totals[1] - totals[0] == 4 * adapters


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_step_told_by_a_sample_needs_what_it_needs_when_laid_out_alone(kind: str) -> None:
    methods: list[tuple[Method, int]] = [("lora", 2), ("lora", 3), ("full", 2), ("full", 1)]
    architecture = architecture_from_config(CONFIGS[kind])
    kept = replace(architecture, layers=architecture.layers[-2:])
    for method, batch_size in methods:
        workload = TrainingWorkload(
            method=method, batch_size=batch_size, max_seq_length=33, num_layers=None
        )
        p = Program()
        alone = p.above(step_roots(p, kept, workload, "metal"), "metal", compiled=True)
        assert Steps(architecture, workload, "metal").step_bytes(2) == alone


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd", "lion"])
def test_an_update_as_one_kernel_needs_what_its_operations_need(optimizer: str) -> None:
    programs = Program(), Program()
    sources = [
        [(p.source(64, 256, width=4, held=False), p.source(64, 256, width=4)) for _ in range(3)]
        for p in programs
    ]
    whole = updated(programs[0], optimizer, *zip(*sources[0], strict=True))
    made = [UPDATES[optimizer](programs[1], *pair) for pair in sources[1]]
    single = [new for new, _ in made] + [state for _, states in made for state in states]
    needed = [
        p.above(roots, "metal", compiled=True)
        for p, roots in zip(programs, (whole, single), strict=True)
    ]
    assert needed[0] - needed[1] == 8  # the number of the step
