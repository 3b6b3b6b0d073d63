"""The plan of a fine-tuning run: its worst batch, its cuts, its verdict, its hours."""

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import CONFIGS, saved_model

from uma.architecture import architecture_from_config
from uma.checkpoint.source import locate
from uma.cli import main
from uma.dataset.batches import batch_plan, padded_length
from uma.dataset.packing import packs
from uma.dataset.passes import passes, shapes
from uma.errors import UnsupportedModel
from uma.ledger import peak, phase_totals
from uma.machine import Machine, budget_of
from uma.plan import fine_tuning
from uma.plan.fine_tuning import (
    Cut,
    FineTuning,
    FineTuningPlan,
    Rows,
    packed_row,
    plan_fine_tuning,
    require_packable,
)
from uma.plan.fine_tuning_remedies import remedies
from uma.plan.forms import forms_of
from uma.plan.training.time import duration
from uma.quantization import Quantization
from uma.report.fine_tuning import batches_text, plan_json, plan_text
from uma.speed import NotKnown
from uma.units import GIB, MIB
from uma.workload import TrainingWorkload

MACHINE = Machine("test", "host", "cpu", 64 * GIB, 64 * GIB, "installed memory")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model("full", tmp_path_factory.mktemp("base") / "model")


def rows(train: tuple[int, ...], batch_size: int, validation: tuple[int, ...] = ()) -> Rows:
    """Rows in which every input has something to predict."""
    return Rows(tuple((n, n) for n in train), tuple((n, n) for n in validation), batch_size)


def lengths(count: int, longest: int, seed: int = 0) -> tuple[int, ...]:
    """Most rows short, a few long, as in chats."""
    rng = np.random.default_rng(seed)
    drawn = np.minimum(longest, (rng.lognormal(4.5, 1.0, count)).astype(int) + 2)
    return (*drawn.tolist()[:-1], longest)


def case(base: Path, data: Rows, budget_bytes: int | None = None, **asked: Any) -> FineTuning:
    architecture = architecture_from_config(CONFIGS["full"])
    form = forms_of(locate(str(base)), architecture, bits=16, backend="cpu")[0]
    workload = TrainingWorkload(num_layers=2, dtype="float32", **asked)
    budget = budget_of(MACHINE, user_budget_bytes=budget_bytes)
    return FineTuning(architecture, form, MACHINE, budget, workload, data)


def test_the_shapes_of_an_epoch_are_those_of_its_batches_in_every_epoch() -> None:
    drawn = lengths(103, 700)
    for epoch in (0, 1, 5):
        found: Counter[tuple[int, int]] = Counter()
        for batch in batch_plan(drawn, 4, seed=3, epoch=epoch):
            found[len(batch), padded_length(max(drawn[n] for n in batch))] += 1
        assert found == shapes(drawn, 4, None)


def test_rows_of_any_length_come_in_few_shapes() -> None:
    """500 rows: mlx_lm.lora pads to every multiple of 32, and each new shape is another trace of
    ``mx.compile`` and other buffers, up to Metal's 499,000 (case B6)."""
    from mlx_lm.tuner.trainer import iterate_batches

    drawn = random.Random(0).choices(range(2, 2048), k=500)
    theirs = {b.shape for b, _ in iterate_batches([([1] * n, 0) for n in drawn], 4, 2048)}
    ours = shapes([n - 1 for n in drawn], 4, None)
    assert len(theirs) >= 50
    assert len(ours) <= 20
    assert sum(rows * count for (rows, _), count in ours.items()) == 500


@pytest.mark.parametrize("pass_tokens", [1, 512, 1500, 5000])
def test_passes_hold_every_row_once_and_no_more_than_their_positions(pass_tokens: int) -> None:
    for rows in (1, 3, 4, 7):
        for length in (32, 256, 1280):
            found = passes(rows, length, pass_tokens)
            assert sum(found) == rows
            assert max(found) * length <= max(pass_tokens, length)
            assert max(found) - min(found) <= 1


def test_the_worst_batch_is_the_one_of_which_no_other_needs_more(base: Path) -> None:
    """mlx_lm.lora meets its longest batch when chance has it (case E1)."""
    data = rows(lengths(41, 600), 4, lengths(9, 300, 1))
    asked = case(base, data, grad_accumulation_steps=2)
    for cut in (Cut(), Cut(2), Cut(1)):
        plan = plan_fine_tuning(asked, cut, smaller=False)
        every = {*asked.shapes(cut), *asked.validation_shapes(cut)}
        targets = asked.rows.most_targets
        needed = {s: peak(asked.terms_of(s, cut, targets(s)))[1] for s in every}
        assert plan.ledger.predicted_peak_bytes == max(needed.values()) == needed[plan.worst]
        assert len(every) > 5


def test_a_budget_cuts_the_batch_and_not_the_update(base: Path) -> None:
    data = rows(lengths(41, 600), 8)
    whole = plan_fine_tuning(case(base, data), Cut(), smaller=True)
    assert whole.micro_batch == 8
    assert whole.notes == ()
    least = plan_fine_tuning(case(base, data), Cut(1), smaller=False)
    between = (whole.ledger.predicted_peak_bytes + least.ledger.predicted_peak_bytes) // 2
    found = plan_fine_tuning(case(base, data, between), Cut(), smaller=True)
    assert found.ledger.verdict == "fits"
    assert 1 <= found.micro_batch < 8
    assert found.ledger.predicted_peak_bytes <= between
    assert "an update still sees 8 rows" in found.notes[0]
    larger = replace(found.cut, micro_batch=found.micro_batch * 2)
    assert plan_fine_tuning(found.case, larger, smaller=False).ledger.verdict == "exceeds"


def test_a_budget_of_ones_own_is_kept_with_the_error_of_the_plan_to_spare(base: Path) -> None:
    data = rows(lengths(41, 600), 8)
    needed = plan_fine_tuning(case(base, data), Cut(4), smaller=False).ledger.predicted_peak_bytes
    for share, rows_at_once in ((1.01, 2), (1.09, 4)):
        asked = case(base, data, int(needed * share))
        assert plan_fine_tuning(asked, Cut(4), smaller=True).micro_batch == rows_at_once


def test_passes_of_a_batch_sum_their_gradients_as_accumulated_batches_do(base: Path) -> None:
    data = lengths(41, 600)
    cut = plan_fine_tuning(case(base, rows(data, 4), rank=512), Cut(1), smaller=False)
    steps = case(base, rows(data, 1), rank=512, grad_accumulation_steps=4)
    assert cut.ledger.terms == plan_fine_tuning(steps, Cut(), smaller=False).ledger.terms
    single = plan_fine_tuning(case(base, rows(data, 1), rank=512), Cut(1), smaller=False)
    gradients = next(t.size_bytes for t in single.ledger.terms if t.name == "adapters")
    assert (
        phase_totals(cut.ledger.terms)["backward"]
        == gradients + (phase_totals(single.ledger.terms)["backward"])
    )


def test_rows_of_which_little_is_predicted_need_less_for_the_loss(base: Path) -> None:
    every = lengths(41, 600)

    def forward_bytes(data: Rows) -> int:
        asked = case(base, data)
        asked = replace(asked, architecture=replace(asked.architecture, vocab_size=50_000))
        return phase_totals(plan_fine_tuning(asked, Cut(), smaller=False).ledger.terms)["forward"]

    masked = Rows(tuple((n, 1 + n // 20) for n in every), (), 8)
    assert forward_bytes(masked) < forward_bytes(rows(every, 8)) - 32 * MIB


def test_slices_are_made_smaller_after_the_micro_batch(base: Path) -> None:
    data = rows(lengths(12, 4000), 2)
    least = plan_fine_tuning(case(base, data), Cut(1), smaller=False).ledger.predicted_peak_bytes
    found = plan_fine_tuning(case(base, data, least - MIB), Cut(), smaller=True)
    assert found.micro_batch == 1
    assert found.cut.loss_slice_bytes < Cut().loss_slice_bytes
    assert found.ledger.predicted_peak_bytes < least


def packed(train: tuple[int, ...], row_tokens: int, batch_size: int) -> Rows:
    rows = [tuple((train[n], train[n]) for n in row) for row in packs(train, row_tokens)]
    return Rows(tuple(map(packed_row, rows)), (), batch_size, tuple(rows))


def test_a_budget_packs_into_shorter_rows_before_it_makes_slices_smaller(base: Path) -> None:
    """The examples of an update are those of the rows that were asked for."""
    data = packed(lengths(300, 150), 1024, 2)
    one = plan_fine_tuning(case(base, data), Cut(1), smaller=False)
    assert one.worst == (1, 1024)
    needed = one.ledger.predicted_peak_bytes
    found = plan_fine_tuning(case(base, data, needed * 2 // 3), Cut(), smaller=True)
    assert found.ledger.verdict == "fits"
    assert found.cut == Cut(1, found.cut.row_tokens)
    assert 150 <= (found.cut.row_tokens or 0) <= 512
    assert found.pass_tokens == found.worst[1]
    passes = sum(rows * count for (rows, _), count in found.shapes.items())
    assert passes > len(data.train)
    assert sum(n for n, _ in found.case.passing(found.cut).train) == sum(n for n, _ in data.train)
    assert f"at most {found.cut.row_tokens:,} tokens" in found.notes[0]
    assert plan_json(found, NotKnown(""), "")["batches"]["row_tokens"] == found.cut.row_tokens
    least = plan_fine_tuning(case(base, data, 1000), Cut(), smaller=True)
    assert least.cut.row_tokens == 150
    assert least.cut.loss_slice_bytes < Cut().loss_slice_bytes
    again = plan_fine_tuning(found.case, found.cut, smaller=True)  # a resumed run
    assert (again.cut, again.notes) == (found.cut, ())
    assert remedies(least)[0].endswith("only a smaller or a quantized base would fit")


def test_packed_rows_of_one_example_each_need_what_they_need_unpacked(base: Path) -> None:
    alone = packed((500, 490, 480, 130, 120, 110, 100), 512, 2)
    assert [len(row) for row in alone.packed].count(1) == 3
    unpacked = rows((500, 490), 2)
    needed = [
        plan_fine_tuning(case(base, data), Cut(), smaller=False).ledger.predicted_peak_bytes
        for data in (alone, unpacked)
    ]
    assert needed[0] >= needed[1]


def test_what_would_fit_is_told_of_the_setting_that_takes_most(base: Path) -> None:
    plan = plan_fine_tuning(
        case(base, rows((50, 60), 2), GIB // 4, rank=1_000_000), Cut(), smaller=True
    )
    assert remedies(plan) == ["--rank 64 with your --budget: adapts less"]
    unasked = replace(plan.case, budget=replace(plan.case.budget, user=False, user_bytes=None))
    assert remedies(replace(plan, case=unasked))[-1] == "--rank 64 --budget auto: adapts less"
    small = plan_fine_tuning(case(base, rows((50, 60), 2), 8 * MIB, rank=4096), Cut(), smaller=True)
    quantized = replace(small.case, budget=budget_of(MACHINE, user_budget_bytes=1000))
    form = replace(quantized.form, quantization=Quantization(4, 64))
    only = plan_fine_tuning(replace(quantized, form=form), Cut(), smaller=True)
    (line,) = remedies(only)
    assert line.endswith("only a smaller base would fit")


def test_what_would_fit_fits_the_budget_that_was_given(
    base: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    within = ("--budget", "4000KiB")
    assert main(dry(base, data, *within)) == 3
    lines = capsys.readouterr().err.splitlines()
    (line,) = (line for line in lines if "--max-seq-length" in line)
    assert line.endswith(" with your --budget")
    assert main(dry(base, data, *within, *line.removesuffix(" with your --budget").split())) == 0


def test_rows_of_one_example_are_not_packed_by_a_budget(base: Path) -> None:
    least = plan_fine_tuning(case(base, rows(lengths(30, 300), 4), 1000), Cut(), smaller=True)
    assert least.cut.row_tokens is None


@pytest.mark.parametrize("kind", ["hybrid", "side_by_side", "recurrent"])
def test_a_model_that_cannot_be_packed_is_refused_by_the_plan(kind: str) -> None:
    """The loaded model is asked too (``test_lora_packing.py``)."""
    with pytest.raises(UnsupportedModel, match="a recurrence"):
        require_packable(architecture_from_config(CONFIGS[kind]))
    for other in CONFIGS.keys() - {"hybrid", "side_by_side", "recurrent"}:
        require_packable(architecture_from_config(CONFIGS[other]))
    gpt2 = {"model_type": "gpt2", "n_positions": 64, "n_embd": 64, "n_head": 4, "n_layer": 2}
    more = {"n_ctx": 64, "vocab_size": 384, "layer_norm_epsilon": 1e-5}
    with pytest.raises(UnsupportedModel, match="learned positions"):
        require_packable(architecture_from_config(gpt2 | more))


def test_a_step_that_is_not_modelled_is_unknown_and_not_refused(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_modelled(*_: Any, **__: Any) -> Any:
        raise UnsupportedModel("a layer of dreams")

    monkeypatch.setattr(fine_tuning, "own_training_terms", not_modelled)
    plan = plan_fine_tuning(case(base, rows((50, 60), 2)), Cut(), smaller=True)
    assert plan.ledger.verdict == "unknown"
    assert "a layer of dreams" in plan.notes[0]
    assert plan.ledger.predicted_peak_bytes == plan.case.form.weights.size_bytes
    small = plan_fine_tuning(case(base, rows((50, 60), 2), 1000), Cut(), smaller=True)
    assert small.ledger.verdict == "exceeds"


def test_the_document_of_a_plan_has_every_term_and_the_sum_of_its_phase(base: Path) -> None:
    plan = plan_fine_tuning(case(base, rows(lengths(9, 300), 4)), Cut(), smaller=False)
    time = duration(plan, iters=100, validations=1, val_batches=25, flops_per_s=(1e9, 1e9))
    document = json.loads(json.dumps(plan_json(plan, time, "tiny")))
    terms = document["ledger"]["terms"]
    assert {"weights", "adapters", "optimizer_states"} <= {term["name"] for term in terms}
    phases = {term["phase"] for term in terms} - {"always"}
    sums = [
        sum(t["predicted_bytes"] for t in terms if t["phase"] in (phase, "always"))
        for phase in phases
    ]
    assert max(sums) == document["ledger"]["predicted_peak_bytes"]
    assert document["ledger"]["verdict"] == "fits"
    assert sum(s["rows"] * s["passes"] for s in document["batches"]["shapes"]) == 9
    assert 0 <= document["batches"]["padding_share"] < 1
    assert plan_text(plan, time, "tiny").count("\n") > 10


@pytest.mark.parametrize(("dtype", "told"), [("float32", 0), ("bfloat16", 1)])
def test_a_base_in_float32_is_not_said_to_take_more_in_float32(
    tmp_path: Path, dtype: str, told: int
) -> None:
    folder = saved_model("full", tmp_path / "model", dtype=dtype)
    config = json.loads((folder / "config.json").read_text())
    config["torch_dtype"] = "bfloat16"  # as a model says that was dequantized
    (folder / "config.json").write_text(json.dumps(config))
    source = locate(str(folder))
    architecture = architecture_from_config(source.config or {})
    form = forms_of(source, architecture, bits=None, backend="cpu")[0]
    assert form.kind == "float32"
    assert sum("times the bytes of" in note for note in form.notes) == told


def test_an_update_is_not_said_to_have_more_rows_than_a_batch_of_the_data(base: Path) -> None:
    asked = case(base, rows((300, 300), 8), 8 * MIB, grad_accumulation_steps=2)
    plan = plan_fine_tuning(asked, Cut(), smaller=True)
    assert "2 rows, updates of 4 rows" in batches_text(plan)
    assert plan.notes[0].endswith("an update still sees 4 rows")


def test_one_shape_of_one_length_is_said_as_one(base: Path) -> None:
    plan = plan_fine_tuning(case(base, rows((50, 50, 50), 1)), Cut(), smaller=False)
    assert batches_text(plan).startswith("3 rows, updates of 1 row; 1 shape of 1 length up to 64")
    many = plan_fine_tuning(case(base, rows((50,) * 5, 2)), Cut(), smaller=False)
    assert "updates of 2 rows; 2 shapes of 1 length up to" in batches_text(many)


def test_the_time_of_a_run_grows_with_its_batches_and_shrinks_with_the_rate(base: Path) -> None:
    plan = plan_fine_tuning(case(base, rows(lengths(40, 300), 4)), Cut(), smaller=False)

    def seconds(iters: int, rate: float, asked: FineTuningPlan = plan) -> tuple[float, float]:
        rates = rate / 2, rate
        found = duration(asked, iters=iters, validations=0, val_batches=25, flops_per_s=rates)
        assert not isinstance(found, NotKnown)
        assert found.low_s < found.high_s
        return found.low_s, found.high_s

    assert seconds(200, 1e9) == pytest.approx([2 * s for s in seconds(100, 1e9)])
    assert seconds(100, 2e9) == pytest.approx([s / 2 for s in seconds(100, 1e9)])
    cut = plan_fine_tuning(plan.case, Cut(1), smaller=False)
    assert seconds(100, 1e9, cut) <= seconds(100, 1e9)  # less padding

    def changed(**changes: Any) -> FineTuningPlan:
        workload = replace(plan.case.workload, **changes)
        return plan_fine_tuning(replace(plan.case, workload=workload), Cut(), smaller=False)

    assert seconds(100, 1e9, changed(rank=10_000))[0] > 10 * seconds(100, 1e9)[0]
    assert seconds(100, 1e9, changed(num_layers=1))[0] < 0.8 * seconds(100, 1e9)[0]
    assert seconds(100, 1e9, changed(method="full"))[0] > seconds(100, 1e9)[0]


def test_a_chip_that_is_not_known_gives_no_time_but_a_reason(base: Path) -> None:
    plan = plan_fine_tuning(case(base, rows((50, 60), 2)), Cut(), smaller=False)
    found = duration(plan, iters=10, validations=1, val_batches=25)
    assert isinstance(found, NotKnown)
    assert "not known" in found.reason


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    rows = [{"prompt": "What? " * n, "completion": "This. " * n} for n in range(1, 20)]
    for name, part in (("train", rows), ("valid", rows[:3])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return folder


def dry(base: Path, data: Path, *more: str) -> list[str]:
    return [
        "lora",
        "train",
        str(base),
        "--data",
        str(data),
        "--num-layers",
        "2",
        "--dry-run",
        *more,
    ]


def test_a_dry_run_reads_no_weights(
    base: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "model"
    copy.mkdir()
    for path in base.iterdir():
        content = path.read_bytes()
        if path.suffix == ".safetensors":  # its header and nothing behind it
            content = content[: 8 + int.from_bytes(content[:8], "little")]
            (copy / path.name).write_bytes(content)
            with (copy / path.name).open("ab") as file:
                file.truncate(path.stat().st_size)
        else:
            (copy / path.name).write_bytes(content)
    assert main(dry(copy, data, "--json", "--iters", "50")) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ledger"]["verdict"] == "fits"
    assert 0 < document["duration"]["duration_s_low"] < document["duration"]["duration_s_high"]
    assert document["duration"]["finishes_low"] <= document["duration"]["finishes_high"]
    assert not Path("adapters").exists()


def test_more_iterations_than_checkpoints_can_name_are_refused(
    base: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ("--iters", "--epochs"):
        assert main(dry(base, data, option, "99999999999999999999")) == 2
        assert f"{option} asks for" in capsys.readouterr().err
    assert main(dry(base, data, "--iters", "9999999")) == 0


def test_a_plan_that_exceeds_ends_with_3_and_says_what_would_fit(
    base: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """mlx_lm.lora begins, and dies when the longest batch comes (cases E1, E20)."""
    assert main(dry(base, data, "--json", "--batch-size", "8")) == 0
    whole = json.loads(capsys.readouterr().out)["ledger"]["predicted_peak_bytes"]
    budget = f"{whole * 4 // 5 // 1024}KiB"
    assert main(dry(base, data, "--json", "--batch-size", "8", "--budget", budget)) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["batches"]["micro_batch"] < 8
    assert found["ledger"]["predicted_peak_bytes"] <= whole * 4 // 5
    run = tmp_path / "run"
    arguments = [a for a in dry(base, data, "--budget", "1MiB") if a != "--dry-run"]
    assert main([*arguments, "--adapter-path", str(run), "--allow-concurrent"]) == 3
    told = capsys.readouterr().err
    assert "your budget is 1.0 MiB" in told
    assert "--force goes on anyway" in told
    assert not run.exists()
