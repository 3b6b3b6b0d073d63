"""A training step traced from mlx-lm's code, against closed forms and measured peaks."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from models import CONFIGS

from uma.architecture import architecture_from_config
from uma.catalog import model_config
from uma.checkpoint.free_names import find_free
from uma.engines.mlx_own_step import own_training_terms
from uma.engines.mlx_training import training_terms
from uma.errors import UnsupportedModel
from uma.ledger import peak, phase_totals
from uma.memory.weights import weight_bytes
from uma.quantization import Quantization
from uma.runtime.trace_training import trace_training
from uma.workload import Backend, Trainer, TrainingWorkload

MEASURED = json.loads((Path(__file__).parent / "data/training_memory_mlx.json").read_text())["rows"]
KINDS = ("full", "sliding", "latent", "moe")


def workload(**changes: Any) -> TrainingWorkload:
    settings: dict[str, Any] = {"num_layers": None, "batch_size": 2, "max_seq_length": 257}
    return TrainingWorkload(**(settings | {"dtype": "float32"} | changes))


def closed(
    config: dict[str, Any], asked: TrainingWorkload, trainer: Trainer, backend: Backend = "cpu"
) -> Any:
    architecture = architecture_from_config(config)
    form = Quantization(4, 32) if asked.quantized else None
    weights = weight_bytes(architecture, form, 4)
    terms = own_training_terms if trainer == "uma" else training_terms
    return terms(architecture, weights, asked, backend=backend)


@pytest.mark.parametrize("kind", KINDS)
def test_each_phase_of_our_own_step_is_within_6_percent_of_its_trace(kind: str) -> None:
    traced = phase_totals(trace_training(CONFIGS[kind], None, workload(), trainer="uma"))
    found = phase_totals(closed(CONFIGS[kind], workload(), "uma"))
    assert traced.keys() == found.keys()
    assert found == pytest.approx(traced, rel=0.06)


def test_a_quantized_base_is_traced_too() -> None:
    asked = workload(quantized="4bit")
    traced = phase_totals(
        trace_training(CONFIGS["full"], Quantization(4, 32), asked, trainer="uma")
    )
    assert phase_totals(closed(CONFIGS["full"], asked, "uma")) == pytest.approx(traced, rel=0.06)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpoint", [False, True])
def test_the_traced_step_of_mlx_lm_is_within_10_percent_of_its_peak(
    kind: str, checkpoint: bool
) -> None:
    row = next(
        row
        for row in MEASURED
        if (row["kind"], row["length"], row["method"]) == (kind, 257, "lora")
        and row["checkpoint"] == checkpoint
    )
    asked = workload(grad_checkpoint=int(checkpoint))
    traced = peak(trace_training(CONFIGS[kind], None, asked))[1]
    assert traced == pytest.approx(
        row["peak_bytes"], rel=0.1 if kind in ("latent", "moe") else 0.03
    )


def test_what_is_there_before_the_step_is_that_of_the_closed_form() -> None:
    for method in ("lora", "dora", "full"):
        asked = workload(method=method, num_layers=2)
        held = [
            sum(t.size_bytes for t in terms if t.phase == "always")
            for terms in (
                trace_training(CONFIGS["full"], None, asked, trainer="uma"),
                closed(CONFIGS["full"], asked, "uma"),
            )
        ]
        assert held[0] == held[1]


@pytest.mark.parametrize("trainer", ["mlx_lm", "uma"])
def test_a_step_for_metal_is_traced_with_its_gradients(trainer: Trainer) -> None:
    """Norms and rotations are decomposed in the trace, where Metal has kernels."""
    config, asked = CONFIGS["full"], workload()
    traced = peak(trace_training(config, None, asked, "metal", trainer=trainer))[1]
    kernels = peak(closed(config, asked, trainer, "metal"))[1]
    assert traced == pytest.approx(kernels, rel=0.12)


@pytest.mark.parametrize("checkpoint", [0, 1])
def test_the_loss_of_a_step_for_metal_is_one_kernel_each_way(checkpoint: int) -> None:
    """mlx 0.32.4, nn/losses.py: no copy of the logits is made, which are nearly all there is."""
    config = {**CONFIGS["full"], "vocab_size": 65_536}
    asked = workload(grad_checkpoint=checkpoint)
    traced = peak(trace_training(config, None, asked, "metal"))[1]
    kernels = peak(closed(config, replace(asked, loss="fused"), "mlx_lm", "metal"))[1]
    assert traced == pytest.approx(kernels, rel=0.05)
    alone = peak(closed(config, asked, "mlx_lm", "metal"))[1]
    assert alone > 1.3 * kernels  # as before that kernel


def test_nothing_of_a_large_model_is_evaluated() -> None:
    config = model_config(find_free("llama-3-8b")).values
    asked = TrainingWorkload(batch_size=1, max_seq_length=129)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    terms = trace_training(config, None, asked, "metal", trainer="uma")
    assert mx.get_peak_memory() - before < 1 << 20
    assert peak(terms)[1] > 16e9


def test_a_recurrent_model_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="leave out --exact"):
        trace_training(CONFIGS["recurrent"], None, workload())
