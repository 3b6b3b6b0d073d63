"""The MLX engine against mlx-lm's own trainer, as ``bench_training_memory.py`` measured it."""

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from models import CONFIGS

from uma.architecture import architecture_from_config
from uma.catalog import model_config
from uma.checkpoint.free_names import find_free
from uma.engines.mlx_training import step_bytes, training_terms
from uma.ledger import peak, phase_totals
from uma.memory.weights import weight_bytes
from uma.quantization import Quantization
from uma.workload import TrainingWorkload

MEASURED = json.loads((Path(__file__).parent / "data/training_memory_mlx.json").read_text())["rows"]
EXACT_SLACK = 32  # bytes: two keys of the random state
RECURRENT = ("recurrent", "hybrid")
PUBLISHED = [  # mlx-lm issue 47, mlx-tune's performance page: GB as printed, rounded
    ("mistral-7b-v0.1", Quantization(4, 64), 4, 1, 7500, 30),
    ("qwen3-0.6b", None, 16, 1, 4096, 18),
]


def predicted(row: dict[str, Any]) -> int:
    architecture = architecture_from_config(CONFIGS[row["kind"]])
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
        architecture = architecture_from_config(CONFIGS[row["kind"]])
        workload = TrainingWorkload(method=row["method"], num_layers=None, dtype="float32")
        weights = weight_bytes(architecture, None, 4)
        terms = training_terms(architecture, weights, workload, backend="cpu")
        held = sum(t.size_bytes for t in terms if t.name in ("weights", "adapters"))
        assert 0 <= row["before_bytes"] - held <= EXACT_SLACK


def test_of_40_peaks_38_are_within_10_percent() -> None:
    found = errors([row for row in MEASURED if row["kind"] not in RECURRENT])
    assert len(found) == 40
    assert median(found) < 0.02
    assert sum(error < 0.1 for error in found) >= 38
    assert max(found) < 0.31


def test_peaks_of_mamba_2_are_within_13_percent() -> None:
    found = errors([row for row in MEASURED if row["kind"] == "recurrent"])
    assert len(found) == 6
    assert sum(error < 0.1 for error in found) >= 5
    assert max(found) < 0.13


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row[0])
def test_peaks_on_metal_are_those_that_users_report(row: Any) -> None:
    name, form, layers, batch, length, gigabytes = row
    architecture = architecture_from_config(model_config(find_free(name)).values)
    workload = TrainingWorkload(num_layers=layers, batch_size=batch, max_seq_length=length)
    found = peak(training_terms(architecture, weight_bytes(architecture, form), workload))[1]
    assert found / 1e9 == pytest.approx(gigabytes, rel=0.08)


def test_the_step_of_many_layers_continues_that_of_few_in_a_straight_line() -> None:
    architecture = architecture_from_config(model_config(find_free("llama-3-8b")).values)
    workload = TrainingWorkload(num_layers=16)
    terms = training_terms(architecture, weight_bytes(architecture), workload)
    step = next(t.size_bytes for t in terms if t.phase == "backward")
    assert step == pytest.approx(step_bytes(architecture, workload, 16, "metal"), rel=0.001)


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
