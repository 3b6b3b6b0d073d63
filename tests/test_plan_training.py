"""Training on machines: what fits, what would help, and the cases that asked for it."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle.tiny import TINY

from uma.architecture import architecture_from_config
from uma.catalog import model_config
from uma.checkpoint.free_names import find_free
from uma.engines import mlx_training
from uma.engines.mlx_own_step import own_training_terms
from uma.engines.torch_model import Settings
from uma.engines.torch_training import training_terms
from uma.errors import UsageError
from uma.ledger import peak, phase_totals
from uma.machine import budget_of
from uma.machine.here import machine_of
from uma.memory.weights import weight_bytes
from uma.plan.training.case import in_short_rows
from uma.plan.training.estimate import TrainingCase, training_estimate
from uma.plan.training.inverses import _largest
from uma.quantization import Quantization
from uma.units import GIB, MIB
from uma.workload import Sharding, TrainingWorkload

ALL: dict[str, Any] = {"num_layers": None}


def case_on(machine: str, model: str, bits: int = 16, **asked: Any) -> TrainingCase:
    here = machine_of(machine)
    architecture = architecture_from_config(model_config(find_free(model)).values)
    form = None if bits == 16 else Quantization(bits, 64)
    torch = here.kind == "discrete"
    asked.setdefault("optimizer", "adamw" if torch else "adam")
    return TrainingCase(
        architecture,
        here,
        budget_of(here),
        "torch" if torch else "mlx",
        TrainingWorkload(**asked),
        weight_bytes(architecture, form),
    )


def test_terms_of_a_phase_sum_to_its_total() -> None:
    found = training_estimate(case_on("mac-studio-m2-ultra-192", "llama-3-8b", 4))
    held = sum(t.size_bytes for t in found.ledger.terms if t.phase in ("always", found.phase))
    assert (
        held == found.ledger.predicted_peak_bytes == phase_totals(found.ledger.terms)[found.phase]
    )


def test_what_is_said_to_fit_does_and_a_quarter_more_does_not() -> None:
    case = case_on("rtx-4090", "llama-3-8b", grad_checkpoint=1, batch_size=1, **ALL)
    found = training_estimate(case)
    for field, value in found.largest.items():
        assert value is not None
        asked = TrainingWorkload(
            grad_checkpoint=1, optimizer="adamw", num_layers=None, **{"batch_size": 1, field: value}
        )
        more = TrainingWorkload(
            grad_checkpoint=1,
            optimizer="adamw",
            num_layers=None,
            **{"batch_size": 1, field: value + max(1, value // 4)},
        )
        needs = [replace(case, workload=w).needed_bytes() for w in (asked, more)]
        assert needs[0] <= case.budget_bytes < needs[1], field


def test_a_change_that_is_not_needed_beside_a_later_one_is_left_out() -> None:
    """An 8-bit optimizer is cheaper than checkpointing, which does without it."""
    found = training_estimate(case_on("rtx-4090", "llama-3-8b", **ALL))
    assert [measure.name for measure in found.measures] == ["loss in slices", "checkpointing"]
    alone = case_on("rtx-4090", "llama-3-8b", grad_checkpoint=1, **ALL)
    assert alone.needed_bytes() > alone.room_bytes


def test_measures_save_what_lies_between_the_peak_and_what_they_leave() -> None:
    case = case_on("rtx-3060", "llama-3-8b", batch_size=8, **ALL)
    found = training_estimate(case)
    assert len(found.measures) > 2
    left = replace(case, workload=found.measures[-1].workload).needed_bytes()
    saved = sum(measure.saves_bytes for measure in found.measures)
    assert left <= case.room_bytes
    assert found.ledger.predicted_peak_bytes - saved == left


def test_two_macs_take_half_of_each_batch() -> None:
    one = case_on("mac-studio-m2-ultra-192", "llama-3-8b", 4, batch_size=2)
    two = case_on("mac-studio-m2-ultra-192", "llama-3-8b", 4, sharding=Sharding(data=2))
    found = training_estimate(two)
    joined = 2 * 32 * MIB  # average_gradients: what is joined for a message, and its sum
    assert found.ledger.predicted_peak_bytes - one.needed_bytes() == joined
    adapters = next(t.size_bytes for t in found.ledger.terms if t.name == "adapters")
    assert found.places.sent_bytes == {"gradients": adapters}  # a ring of two sends all of it once


def test_a_batch_that_the_workers_do_not_divide_is_refused_as_mlx_lm_does() -> None:
    case = case_on("mac-studio-m2-ultra-192", "llama-3-8b", 4, sharding=Sharding(data=3))
    with pytest.raises(UsageError, match="not divisible by 3 devices"):
        training_estimate(case)


def test_what_mlx_does_not_have_is_said_to_be_another_engines() -> None:
    spread = Sharding(data=2, zero_stage=3)
    case = case_on("mac-studio-m2-ultra-192", "llama-3-8b", 4, sharding=spread)
    with pytest.raises(UsageError, match="ZeRO is DeepSpeed's"):
        training_estimate(case)


def test_offloaded_states_of_all_devices_lie_on_the_host() -> None:
    spread = Sharding(data=8, zero_stage=3, offload_optimizer="host")
    case = case_on(
        "8xh100", "llama-3-70b", method="full", grad_checkpoint=1, sharding=spread, **ALL
    )
    found = training_estimate(case)
    parameters = case.architecture.num_parameters
    # Weights, gradients and moments in float32, gradients in 16 bits; what is pinned is a power of
    # two: of 8.8 billion gradients 9 arrays of 4 GiB and one of 32.
    pinned = 8 * (9 * 4 + 32) * GIB
    assert found.host_bytes == pytest.approx(pinned + 12 * parameters, rel=1e-6)
    assert found.places.sent_bytes["parameters"] == 2 * 2 * parameters * 7 // 8
    assert not any(t.name == "optimizer_states" for t in found.ledger.terms)


def test_our_own_trainer_needs_the_same_for_as_many_positions() -> None:
    """So that long rows are laid out as short ones, but for layers that recur."""
    asked = {"batch_size": 2, "max_seq_length": 2049}
    case = case_on("mac-studio-m2-ultra-192", "llama-3.2-1b", 4, **asked)
    assert case.weights is not None
    whole, short = (
        own_training_terms(case.architecture, case.weights, workload)
        for workload in (case.workload, in_short_rows(case.workload, case.architecture))
    )
    assert peak(short)[1] == pytest.approx(peak(whole)[1], rel=0.01)
    hybrid = case_on("mac-studio-m2-ultra-192", "qwen3.5-4b", 4, **asked)
    assert in_short_rows(hybrid.workload, hybrid.architecture) is hybrid.workload


def test_the_inverses_of_our_own_trainer_share_the_positions() -> None:
    case = case_on("mac-mini-m4-16", "llama-3.2-3b", 4, batch_size=2, max_seq_length=1024)
    found = training_estimate(replace(case, trainer="uma")).largest
    batch, length = found["batch_size"], found["max_seq_length"]
    assert batch is not None
    assert length is not None
    for changes, fits in (
        ({"batch_size": batch}, True),
        ({"batch_size": batch + 2}, False),
        ({"max_seq_length": length}, True),
        ({"max_seq_length": length + 1}, False),
    ):
        needed = replace(case.changed(**changes), trainer="uma").needed_bytes()
        assert (needed <= case.budget_bytes) is fits


@pytest.mark.parametrize("rank", [64, 300, 2048])
def test_the_largest_rank_does_not_depend_on_the_one_that_is_asked(rank: int) -> None:
    shared: dict[str, Any] = {"batch_size": 1, "grad_checkpoint": 1, **ALL}
    shared["sharding"] = Sharding(data=2, zero_stage=2)
    asked, few = (case_on("2xrtx-4090", "llama-3-8b", rank=n, **shared) for n in (rank, 8))
    found = [training_estimate(case).largest["rank"] for case in (asked, few)]
    assert found[0] == pytest.approx(found[1], rel=1 / 32)


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("optimizer", ["adam", "muon", "adamw-8bit"])
@pytest.mark.parametrize("batch_size", [1, 64])
def test_what_is_left_out_of_a_search_is_not_the_peak(
    method: Any, optimizer: Any, batch_size: int
) -> None:
    """The update of our own trainer binds where all is trained on few tokens."""
    asked = {"method": method, "optimizer": optimizer, "batch_size": batch_size, **ALL}
    case = case_on("mac-mini-m4-16", "smollm2-135m", max_seq_length=129, **asked)
    case = replace(case, trainer="uma")
    (phase, needed), brief = peak(case.terms()), case.terms(peak_alone=True)
    assert case.needed_bytes() == needed
    if method == "full" and batch_size == 1:
        assert phase == "optimizer"
    left_out = phase_totals(case.terms())["optimizer"] != phase_totals(brief)["optimizer"]
    assert left_out is (method == "lora" and batch_size == 64)


def test_what_fits_is_not_above_the_largest_where_layers_recur() -> None:
    asked: dict[str, Any] = {"method": "full", "num_layers": 16, "batch_size": 4}
    case = replace(case_on("macbook-pro-m5-16", "granite-4.0-h-1b", **asked), trainer="uma")
    found = training_estimate(case)
    assert found.ledger.verdict == "fits"
    assert found.largest == {"batch_size": 4, "max_seq_length": 2048}


@pytest.mark.parametrize("name", sorted(TINY))
@pytest.mark.parametrize("method", ["lora", "full"])
def test_every_module_of_mlx_lm_is_laid_out_under_both_engines(name: str, method: Any) -> None:
    architecture = architecture_from_config({"model_type": name, **TINY[name]})
    asked = TrainingWorkload(method=method, num_layers=None, batch_size=1, max_seq_length=64)
    weights = weight_bytes(architecture)
    mlx = peak(mlx_training.training_terms(architecture, weights, asked))[1]
    torch = peak(training_terms(architecture, asked, Settings()))[1]
    assert min(mlx, torch) > weights.size_bytes


PEAKS = st.lists(
    st.tuples(st.integers(0, 10**9), st.integers(0, 10**7), st.integers(0, 2000)),
    min_size=1,
    max_size=3,
)


@given(PEAKS, st.integers(1, 5000), st.integers(1, 10**11))
def test_the_largest_number_fits_and_one_that_is_a_little_larger_does_not(
    phases: list[tuple[int, int, int]], asked: int, room: int
) -> None:
    """Phases are parabolas over a batch or a length; the highest of them is what is needed."""

    def needed(n: int) -> int:
        return max(constant + slope * n + curve * n * n for constant, slope, curve in phases)

    held = min(constant for constant, _, _ in phases)
    found = _largest(needed, asked, held, room, 10_000) if held <= room else None
    if found is None:
        assert needed(1) > room
        return
    assert needed(found) <= room
    assert found == 10_000 or needed(found + max(2, found // 16)) > room


@pytest.mark.parametrize("machine", ["rtx-4090", "mac-studio-m2-ultra-192"])
@pytest.mark.parametrize("batch_size", [1, 64])
def test_inverses_and_measures_take_few_evaluations(
    machine: str, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nearly all the time of an estimate is in them: 5 to 25 ms each with torch, 35 to 60 MLX."""
    made = []
    original = TrainingCase.needed_bytes
    monkeypatch.setattr(
        TrainingCase, "needed_bytes", lambda case: made.append(case) or original(case)
    )
    training_estimate(case_on(machine, "llama-3-8b", batch_size=batch_size))
    assert len(made) <= (15 if machine == "rtx-4090" else 6)
