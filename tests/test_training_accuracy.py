"""How rows of measured training memory are read and scored (``scripts/scoring/training*.py``)."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import fit_training  # noqa: E402
from scoring import training  # noqa: E402
from scoring.rows import INCOMPLETE, REASONS, UNTRUSTWORTHY, Row, Skipped, read_rows  # noqa: E402
from scoring.summary import Group, statistics  # noqa: E402
from scoring.training_recipes import shape_of  # noqa: E402
from scoring.training_words import method_of, optimizer_of, quantized_of  # noqa: E402

from uma.engines import torch_training  # noqa: E402

ROWS = read_rows(ROOT / "uma/data/truth/training.csv")
QWEN = {"framework": "ms-swift", "model": "Qwen/Qwen2.5-7B-Instruct", "micro_batch": "1"}


def row(**cells: str) -> Row:
    return {**dict.fromkeys(ROWS[0], ""), **cells}


@pytest.fixture(scope="module")
def groups() -> dict[str, Group]:
    return training.score(ROWS)


@pytest.mark.parametrize(
    ("name", "most_median", "most_p90"),
    [("training ready", 0.05, 0.15), ("training other", 0.12, 0.35)],
)
def test_peaks_of_training_are_as_right_as_we_say(
    groups: dict[str, Group], name: str, most_median: float, most_p90: float
) -> None:
    found = statistics(groups[name].errors)
    assert found["median_abs_error"] <= most_median
    assert found["p90_abs_error"] <= most_p90


def test_runs_out_of_memory_would_have_exceeded_the_card(groups: dict[str, Group]) -> None:
    counts = groups["training out of memory"].confusion
    assert counts["true_exceeds"] >= 0.95 * counts.total() > 50


def test_four_of_five_rows_are_scored_and_the_others_have_a_reason(
    groups: dict[str, Group],
) -> None:
    scored, eligible = (
        sum(getattr(group, name) for group in groups.values()) for name in ("scored", "eligible")
    )
    assert scored >= 0.8 * eligible
    for group in groups.values():
        assert set(group.skipped.values()) <= set(REASONS)


def test_the_shares_of_slack_are_those_that_their_program_fits() -> None:
    points = [found for row in ROWS if (found := fit_training.point_of(row)) is not None]
    for name, share in fit_training.fitted(points).items():
        assert getattr(torch_training, name) == pytest.approx(share, abs=0.006), name


def test_a_pool_that_the_end_of_the_card_cut_off_is_not_fitted() -> None:
    one = next(row for row in ROWS if fit_training.point_of(row) is not None)
    shown = float(re.findall(r"nvidia-smi peak \(mean over GPUs\) ([\d.]+) MiB", one["notes"])[0])
    assert fit_training.point_of({**one, "device_mem_gb": str(shown / 1024 / 0.9)}) is not None
    assert fit_training.point_of({**one, "device_mem_gb": str(shown / 1024 / 0.95)}) is None


def test_the_pool_of_a_run_that_ended_well_is_no_larger_than_its_card() -> None:
    cells = {"seq_len": "2048", "seq_len_kind": "fixed", "method": "lora", "rank": "8"}
    ended = row(**QWEN, **cells, n_gpus="1", mem_kind="device_used", outcome="ok")
    alone = training.predicted_bytes(ended, training.case_of(ended))
    held = training.case_of({**ended, "mem_kind": "torch_allocated"})
    allocated = training.predicted_bytes({**ended, "mem_kind": "torch_allocated"}, held)
    between = (alone + allocated) // 2
    on_card = {**ended, "device_mem_gb": str(between / 2**30)}
    assert training.predicted_bytes(on_card, training.case_of(on_card)) == pytest.approx(between)
    tiny = {**ended, "device_mem_gb": "1"}
    assert training.predicted_bytes(tiny, training.case_of(tiny)) > allocated
    failed = {**on_card, "outcome": "OOM"}
    assert training.predicted_bytes(failed, training.case_of(failed)) == alone


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ({"seq_len": "2048", "seq_len_kind": "fixed (packed)"}, (2048, False, False)),
        ({"seq_len": "8192", "seq_len_kind": "max_length; packing"}, (8192, False, False)),
        ({"seq_len": "8192", "seq_len_kind": "max_length"}, (8192, True, True)),
        ({"seq_len": "8192", "seq_len_kind": "max_length; padding_free"}, (8192, True, True)),
        ({"seq_len_kind": "Alpaca (padded; max 1304 tokens)"}, (1304, True, False)),
    ],
)
def test_a_cap_on_unknown_lengths_is_a_bound(
    cells: dict[str, str], expected: tuple[int, bool, bool]
) -> None:
    found = shape_of(row(**QWEN, **cells))
    assert (found.length, found.varies, found.bound) == expected


def test_a_recipe_tells_the_length_and_the_batch_that_a_row_leaves_out() -> None:
    page = "https://example.org/ms-swift/blob/x/examples/train/tuners/lora/train.sh"
    cells = {**QWEN, "micro_batch": "", "source": page}
    found = shape_of(row(**cells, seq_len="2048", seq_len_kind="max_length"))
    assert (found.batch, found.length, found.bound) == (1, 131, False)


def test_batches_without_padding_are_as_long_as_their_throughput_and_the_spread_say() -> None:
    """1,815.504 tokens/s, 1.274 s a step of 4 x 2 rows: 289.1 a row, the worst 1.96 times that."""
    cells = {"tokens_per_s": "1815.504", "s_per_it": "1.274", "grad_accum": "2"}
    kind = "variable, padding-free"
    assert shape_of(row(micro_batch="4", seq_len_kind=kind, **cells)).length == 567


def test_a_row_without_length_and_recipe_is_incomplete() -> None:
    with pytest.raises(Skipped, match=INCOMPLETE):
        shape_of(row(**QWEN))


def test_a_bound_is_scored_where_shorter_rows_need_nearly_as_much() -> None:
    cells = {"seq_len": "512", "seq_len_kind": "max_length", "n_gpus": "1", "precision": "bf16"}
    name = {**QWEN, "mem_kind": "torch_allocated"}
    full = row(**name, **cells, method="full")
    assert training.predicted_bytes(full, training.case_of(full)) > 0
    lora = row(**name, **{**cells, "seq_len": "8192"}, method="lora", rank="8")
    with pytest.raises(Skipped, match=INCOMPLETE):
        training.predicted_bytes(lora, training.case_of(lora))


@pytest.mark.parametrize("told", ["full+galore32", "adalora", "lora (DPO)", "llamapro", "peft-x"])
def test_methods_of_other_kinds_are_not_claimed(told: str) -> None:
    with pytest.raises(Skipped, match="format not claimed"):
        method_of(row(method=told))


def test_other_tasks_are_told_by_the_notes() -> None:
    assert method_of(row(method="full(default)", notes="variant 'x'; task sft")) == "full"
    with pytest.raises(Skipped, match="format not claimed"):
        method_of(row(method="full", notes="; task kto"))


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ("bnb PagedAdamW8bit + optimizer_in_bwd", "paged-adamw-8bit"),
        ("AdamW8bit (torchao)", "adamw-8bit"),
        ("AdamW (PyTorch fused)", "adamw"),
        ("", "adamw"),
    ],
)
def test_optimizers_are_read_from_their_words(told: str, name: str) -> None:
    assert optimizer_of(row(optimizer=told)) == name


def test_torchao_quantizes_the_scales_of_nf4_too() -> None:
    assert quantized_of(row(quant="torchao NF4")) == "nf4-double"
    with pytest.raises(Skipped, match="format not claimed"):
        quantized_of(row(quant="AQLM 2-bit 1x16"))


def test_only_what_the_collectors_took_back_is_untrustworthy() -> None:
    """Trust D is a formula's output; a rounded number (C) is scored as any other."""
    cells = {**QWEN, "method": "full", "seq_len": "512", "seq_len_kind": "fixed"}
    known = {"n_gpus": "1", "mem_kind": "torch_allocated"}
    assert training.case_of(row(**cells, **known, trust="C")).workload.max_seq_length == 512
    for doubt in ({"trust": "D"}, {"notes": "WARNING value equals a card size"}):
        with pytest.raises(Skipped, match=UNTRUSTWORTHY):
            training.case_of(row(**cells, **known, **doubt))


@pytest.mark.parametrize("program", ["ms-swift megatron", "mlx-vlm", "unsloth MLX", "GaLore"])
def test_programs_with_trainers_of_their_own_are_not_claimed(program: str) -> None:
    with pytest.raises(Skipped, match="engine not claimed"):
        training.case_of(row(framework=program, method="full"))
