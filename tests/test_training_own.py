"""The prediction of our own trainer's step against what ``bench_training_memory.py`` measured."""

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from models import CONFIGS

from uma.architecture import architecture_from_config
from uma.architecture.layers import Recurrent
from uma.catalog import model_config
from uma.checkpoint.free_names import find_free
from uma.dataset.batches import padded_length
from uma.engines import mlx_own_recurrence
from uma.engines.mlx_own_step import OwnStep, own_training_terms
from uma.engines.mlx_training import training_terms
from uma.engines.mlx_updates import update_8bit_bytes
from uma.ledger import peak, phase_totals
from uma.memory.weights import weight_bytes
from uma.runtime.lora.optimizer import make_optimizer
from uma.workload import Method, TrainingWorkload

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
from bench_training_memory import own_measured, own_predicted

MEASURED = json.loads((Path(__file__).parent / "data/training_memory_own.json").read_text())["rows"]
KINDS = ("full", "sliding", "latent", "moe", "recurrent", "hybrid")
TOLERANCE = 0.08


def error(row: dict[str, Any]) -> float:
    return abs(own_predicted(row) / row["peak_bytes"] - 1)


def workload(**changes: Any) -> TrainingWorkload:
    settings: dict[str, Any] = {"num_layers": None, "batch_size": 2, "max_seq_length": 257}
    return TrainingWorkload(**(settings | {"dtype": "float32"} | changes))


def terms(kind: str, **changes: Any) -> Any:
    architecture = architecture_from_config(CONFIGS[kind])
    return own_training_terms(
        architecture, weight_bytes(architecture, None, 4), workload(**changes), backend="cpu"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_peaks_of_a_grid_of_shapes_are_within_8_percent(kind: str) -> None:
    found = {str(row): error(row) for row in MEASURED if row["kind"] == kind}
    assert len(found) >= 15
    assert {row: e for row, e in found.items() if e > TOLERANCE} == {}


def test_a_step_that_runs_now_stays_within_8_percent() -> None:
    case = next(r for r in MEASURED if r["kind"] == "full" and r["length"] == 128)
    case = case | {"vocab": 2048}
    measured = own_measured(case)["peak_bytes"]
    assert own_predicted(case) == pytest.approx(measured, rel=TOLERANCE)


def test_what_is_held_before_a_step_is_that_of_mlx_lm() -> None:
    architecture = architecture_from_config(CONFIGS["moe"])
    weights = weight_bytes(architecture, None, 4)
    theirs = training_terms(architecture, weights, workload(), backend="cpu")
    held = [
        {t.name: t.size_bytes for t in found if t.phase == "always"}
        for found in (terms("moe"), theirs)
    ]
    assert held[0] == held[1]


def test_our_own_step_needs_less_than_mlx_lm_with_its_checkpointing() -> None:
    """Latent attention needs as much: its rotary scores are a mask that is added, and not cut."""
    for kind in ("full", "sliding", "moe"):
        architecture = architecture_from_config(CONFIGS[kind])
        weights = weight_bytes(architecture, None, 4)
        asked = workload(max_seq_length=513, grad_checkpoint=1)
        theirs = training_terms(architecture, weights, asked, backend="cpu")
        assert peak(terms(kind, max_seq_length=513))[1] < peak(theirs)[1]


def test_rows_are_as_long_as_they_are_padded() -> None:
    architecture = architecture_from_config(CONFIGS["full"])
    assert OwnStep(architecture, workload(max_seq_length=250)).length == padded_length(249)


def test_smaller_slices_need_less_and_longer_rows_more() -> None:
    architecture = architecture_from_config(CONFIGS["full"] | {"vocab_size": 32768})
    weights = weight_bytes(architecture, None, 4)
    totals = [
        peak(
            own_training_terms(
                architecture,
                weights,
                workload(max_seq_length=length),
                backend="cpu",
                loss_slice_bytes=size << 20,
            )
        )[1]
        for length, size in ((257, 8), (257, 64), (513, 64))
    ]
    assert totals == sorted(totals)
    assert totals[0] < totals[1]


def test_accumulated_gradients_are_held_in_every_phase() -> None:
    one, four = (phase_totals(terms("full", grad_accumulation_steps=n)) for n in (1, 4))
    size = next(t.size_bytes for t in terms("full") if t.name == "adapters")
    assert four["backward"] - one["backward"] == size
    assert four["optimizer"] - one["save"] == 3 * size  # both and their sum


def test_the_first_trained_layer_has_no_gradient_of_its_input() -> None:
    step = OwnStep(architecture_from_config(CONFIGS["full"]), workload(method="full"), "cpu")
    layer = step.architecture.layers[0]
    assert step.backward(layer, first=True) != step.backward(layer)


@pytest.mark.parametrize("shapes", [[(256, 256)] * 3, [(1024, 512), (2048, 1024)]])
def test_an_update_in_8_bits_takes_what_is_said(shapes: list[tuple[int, int]]) -> None:
    model = nn.Module()
    for n, shape in enumerate(shapes):
        setattr(model, f"w{n}", mx.random.normal(shape))
    gradients = dict(model.parameters())
    optimizer = make_optimizer("adamw8bit", 1e-5)
    mx.eval(gradients)
    measured = []
    for _ in range(3):
        mx.synchronize()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)
        measured.append(mx.get_peak_memory() - before)
    said = update_8bit_bytes([(shape, 4) for shape in shapes])
    assert max(measured[1:]) == pytest.approx(said, rel=TOLERANCE)


def test_examples_that_share_a_row_see_a_part_of_it() -> None:
    apart = terms("full", max_seq_length=1025)
    architecture = architecture_from_config(CONFIGS["full"])
    packed = own_training_terms(
        architecture,
        weight_bytes(architecture, None, 4),
        workload(max_seq_length=1025),
        backend="cpu",
        packed_tokens=100,
    )
    assert peak(packed)[1] < 0.5 * peak(apart)[1]


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("kind", ["qwen3.5-4b", "granite-4.0-h-micro"])
def test_chunks_in_the_middle_are_taken_as_few(
    kind: str, method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    """128 and 32 of them."""
    architecture = architecture_from_config(model_config(find_free(kind)).values)
    layer = next(one for one in architecture.layers if isinstance(one.mixers[0], Recurrent))
    asked = workload(method=method, batch_size=4, max_seq_length=2049)
    few = OwnStep(architecture, asked).backward(layer)
    monkeypatch.setattr(mlx_own_recurrence, "BETWEEN", 1 << 20)
    assert OwnStep(architecture, asked).backward(layer) == pytest.approx(few, rel=0.015)
