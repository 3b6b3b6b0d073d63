"""The plan of ``uma lora train``: from its options and the data to memory, cuts and hours."""

import json as json_module
import re
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from uma.cli.lora.asked import Asked
from uma.cli.options import size_option
from uma.cli.progress import say
from uma.errors import DoesNotFit, UnsupportedModel, UsageError

if TYPE_CHECKING:
    from uma.architecture.layers import Architecture
    from uma.checkpoint.source import ModelSource
    from uma.dataset.check import Split
    from uma.engines.mlx_training import Trained
    from uma.machine import Budget, Machine
    from uma.plan.fine_tuning import Cut, FineTuningPlan, Rows
    from uma.plan.forms import Form
    from uma.plan.training.time import Duration
    from uma.runtime.lora.adapter import Adapter
    from uma.runtime.lora.train import Course
    from uma.speed import NotKnown
    from uma.workload import TrainingWorkload

_OPTIMIZERS = {"adamw8bit": "adamw-8bit"}
"""Our names of optimizers, in the words of estimates where they differ."""

_OF_ONE_LAYER = re.compile(r"\.\d+\.")

DEFAULT_LAYERS = 16
"""Of mlx_lm.lora; a model with fewer trains them all."""

MOST_ITERATIONS = 9_999_999
"""Checkpoints are named by seven digits."""


def print_plan(asked: Asked) -> int:
    """``--dry-run``: the data is read, the weights are not. The exit code."""
    from uma.cli.lora.data import tokenizer_of
    from uma.cli.lora.result import tell_nothing_left
    from uma.cli.session import live_machine
    from uma.report.fine_tuning import plan_json, plan_text

    source, encoder = tokenizer_of(asked.model, quiet=asked.quiet, yes=asked.yes)
    asked = with_layers(asked, source)
    splits = read_splits(asked, encoder)
    if (reason := nothing_left(asked, splits)) is not None:
        return tell_nothing_left(asked, reason)
    cut, done = begun(asked)
    plan = planned(asked, source, splits, live_machine(), cut)
    time = duration_of(asked, plan, course_of(asked, splits), done)
    if asked.json:
        print(json_module.dumps(plan_json(plan, time, source.name), indent=2))
    else:
        print(plan_text(plan, time, source.name))
    if plan.ledger.verdict != "exceeds" or asked.force:
        return 0
    say(f"uma: {exceeded(plan, source.name).args[0]}")
    return DoesNotFit.exit_code


def with_layers(asked: Asked, source: "ModelSource") -> Asked:
    """The options with a number of layers to train.

    Raises:
        UnsupportedModel: If the model's layers are not known.
    """
    from uma.architecture import architecture_from_config

    if asked.num_layers is not None:
        return asked
    there = len(architecture_from_config(source.config or {}).layers)
    return replace(asked, num_layers=min(DEFAULT_LAYERS, there))


def read_splits(asked: Asked, encoder: Any) -> "dict[str, Split]":
    """The data, tokenized; what a reader should know of it is said.

    Raises:
        DataError: If a row cannot be used, or nothing is left to train on.
    """
    from uma.cli.lora.data import checked
    from uma.cli.lora.doubts import doubts
    from uma.dataset.check import findings, require_examples, split_files

    splits = checked(
        asked.data,
        encoder,
        mask_prompt=asked.mask_prompt,
        max_seq_length=asked.max_seq_length,
        overlong=asked.overlong,
        quiet=asked.quiet,
        only=[name for name in split_files(asked.data) if name != "test"],
    )
    for split in splits.values():
        require_examples(split)
    updates = -(-course_of(asked, splits).iters // asked.grad_accumulation_steps)
    for line in [*findings(splits, asked.batch_size), *doubts(asked, updates)]:
        say(f"note: {line}", asked.quiet)
    return splits


def begun(asked: Asked) -> "tuple[Cut | None, int]":
    """How a resumed run was cut until now, and how many batches are done."""
    from uma.measurement.run_folder import last_plan, last_progress
    from uma.plan.fine_tuning import Cut

    if not asked.resume:
        return None, 0
    done = last_progress(asked.adapter_path).iteration
    plan = last_plan(asked.adapter_path)
    return (Cut(**plan["cut"]) if "cut" in plan else None), done


def nothing_left(asked: Asked, splits: "dict[str, Split]") -> str | None:
    """Why a resumed run has nothing left to do, if it has not."""
    from uma.measurement.run_folder import last_progress
    from uma.runtime.lora.train import due, exhausted

    if not asked.resume:
        return None
    progress = last_progress(asked.adapter_path)
    course = course_of(asked, splits)
    more = "iters" if asked.epochs is None else "epochs"
    to_validate = "valid" in splits and due(progress, course)
    if progress.iteration >= course.iters and not to_validate:
        return (
            f"nothing is left to do: {progress.iteration:,} iterations are done of {course.iters:,}"
            f"; give more --{more}"
        )
    if exhausted(course, progress):
        return (
            f"nothing is left to do: of {progress.worse} validations none had a lower loss; give a "
            "larger --patience"
        )
    return None


def planned(
    asked: Asked,
    source: "ModelSource",
    splits: "dict[str, Split]",
    machine: "Machine",
    cut: "Cut | None" = None,
) -> "FineTuningPlan":
    """The plan; ``cut`` is how a resumed run was cut until now.

    Raises:
        UnsupportedModel: If the model's layers are not known, or a budget cannot be kept.
    """
    from uma.architecture import architecture_from_config
    from uma.plan.fine_tuning import Cut, FineTuning, plan_fine_tuning, require_packable
    from uma.plan.forms import forms_of
    from uma.quantization import quantization_of_config

    config = source.config or {}
    architecture = architecture_from_config(config)
    if asked.packing:
        require_packable(architecture)
    stored = quantization_of_config(config)
    wide = asked.dequantize == "always"
    # A base in 16 bits is trained as it is.
    forms = forms_of(
        source,
        architecture,
        bits=None if stored else 16,
        backend="cpu" if wide else machine.backend,
    )
    if asked.micro_batch is not None:
        cut = replace(cut or Cut(), micro_batch=min(asked.micro_batch, asked.batch_size))
    rows, budget = rows_of(asked, splits), _budget(asked, machine)
    # In float32 where that is the fast form, if it fits: else as it is stored.
    tried = {"always": forms[:1], "never": forms[-1:], "auto": (forms[0], forms[-1])}
    for form in tried[asked.dequantize]:
        workload = workload_of(asked, form)
        unknown = _not_modelled(asked, architecture, workload, trained_of(asked, source, form))
        case = FineTuning(architecture, form, machine, budget, workload, rows, unknown)
        plan = plan_fine_tuning(case, cut or Cut(), smaller=asked.budget is not None)
        if plan.ledger.verdict != "exceeds":
            break
    if plan.ledger.verdict == "unknown" and asked.budget is not None and not asked.force:
        raise UnsupportedModel(
            f"--budget {asked.budget} cannot be kept: {plan.notes[0]}; leave it out"
        )
    return plan


def trained_of(asked: Asked, source: "ModelSource", form: "Form") -> "list[Trained]":
    """The arrays that would train, found by putting the adapter on the model, not yet read.

    Raises:
        UsageError, UnsupportedModel: If it cannot be put, which is known before anything is loaded.
    """
    from uma.engines.mlx_training import Trained
    from uma.runtime.lora.adapter import adapted

    assert source.path is not None
    found = adapted(source.path, adapter_of(asked), float32=form.kind == "float32")
    return [Trained(tuple(value.shape), value.itemsize) for value in found.values()]


def _not_modelled(
    asked: Asked,
    architecture: "Architecture",
    workload: "TrainingWorkload",
    trained: "list[Trained]",
) -> str:
    """What the terms of ``workload`` leave out of what would be trained, if anything."""
    from uma.cli.lora.config import settings_of
    from uma.engines.mlx_training import trained_arrays

    settings = settings_of(asked.optimizer, asked.optimizer_config) or {}
    if asked.optimizer == "adafactor" and settings.get("beta_1") is not None:
        return "Adafactor with beta_1 keeps an average of all gradients too"
    counted = []
    with suppress(UsageError):  # nothing of it is in the layers
        counted = trained_arrays(architecture, workload)
    of_one = any(_OF_ONE_LAYER.search(key) for key in asked.keys or ())
    if of_one or sum(a.size_bytes for a in counted) != sum(a.size_bytes for a in trained):
        return "the adapter is not the same on all trained layers, and on nothing else"
    return ""


def adapter_of(asked: Asked) -> "Adapter":
    from uma.runtime.lora.adapter import Adapter

    assert asked.num_layers is not None
    return Adapter(
        method=asked.fine_tune_type,
        num_layers=asked.num_layers,
        rank=asked.rank,
        scale=asked.scale,
        dropout=asked.dropout,
        keys=tuple(asked.keys) if asked.keys else None,
    )


def _budget(asked: Asked, machine: "Machine") -> "Budget":
    from uma.machine import budget_of

    own = None if asked.budget == "auto" else size_option(asked.budget, "--budget")
    reserve = size_option(asked.reserve, "--reserve")
    return budget_of(machine, user_budget_bytes=own, reserve_bytes=reserve)


def workload_of(asked: Asked, form: "Form") -> "TrainingWorkload":
    """The workload in the words of estimates."""
    from uma.workload import TrainingWorkload

    full = asked.fine_tune_type == "full"
    return TrainingWorkload(
        method=asked.fine_tune_type,
        rank=asked.rank,
        targets=() if full else tuple(asked.keys or ()),
        num_layers=None if asked.num_layers == -1 else asked.num_layers,
        batch_size=asked.batch_size,
        max_seq_length=asked.max_seq_length,
        optimizer=_OPTIMIZERS.get(asked.optimizer, asked.optimizer),
        dtype="float32" if form.activation_bytes == 4 else "bfloat16",
        quantized="" if form.quantization is None or form.kind == "float32" else "affine",
        grad_accumulation_steps=asked.grad_accumulation_steps,
    )


def rows_of(asked: Asked, splits: "dict[str, Split]") -> "Rows":
    """What fills the rows of batches: examples, or several that are packed."""
    from uma.dataset.packing import packs
    from uma.plan.fine_tuning import Rows, packed_row

    train, valid = (
        tuple((len(e.tokens) - 1, e.targets) for e in splits[name].fitted.examples)
        if name in splits
        else ()
        for name in ("train", "valid")
    )
    if not asked.packing:
        return Rows(train, valid, asked.batch_size)
    packed = packs([inputs for inputs, _ in train], asked.max_seq_length)
    rows = tuple(tuple(train[n] for n in row) for row in packed)
    return Rows(tuple(map(packed_row, rows)), valid, asked.batch_size, rows)


def course_of(
    asked: Asked, splits: "dict[str, Split]", plan: "FineTuningPlan | None" = None
) -> "Course":
    """How to go through the data, cut as planned."""
    from uma.runtime.lora.train import Course

    batches = -(-len(rows_of(asked, splits).train) // asked.batch_size)
    iters = asked.iters or (asked.epochs or 0) * batches
    if iters > MOST_ITERATIONS:
        raise UsageError(
            f"{'--iters' if asked.epochs is None else '--epochs'} asks for {iters:,} iterations; "
            f"{MOST_ITERATIONS:,} are the most"
        )
    course = Course(
        iters=iters,
        batch_size=asked.batch_size,
        grad_accumulation_steps=asked.grad_accumulation_steps,
        seed=asked.seed,
        max_grad_norm=asked.max_grad_norm,
        pack_tokens=asked.max_seq_length if asked.packing else None,
        steps_per_report=asked.steps_per_report,
        steps_per_eval=asked.steps_per_eval,
        val_batches=asked.val_batches,
        save_every=asked.save_every,
        patience=asked.patience,
    )
    if plan is None:
        return course
    return replace(
        course,
        pass_tokens=plan.pass_tokens,
        row_tokens=plan.cut.row_tokens,
        loss_rows=plan.loss_rows,
        attention_slice_bytes=plan.cut.attention_slice_bytes,
    )


def duration_of(
    asked: Asked, plan: "FineTuningPlan", course: "Course", done: int = 0
) -> "Duration | NotKnown":
    """How long what is left of the run will take, from batch ``done`` on."""
    from uma.plan.training.time import duration

    left = max(1, course.iters - done)
    flops = None
    if plan.case.machine.backend == "cpu":
        from uma.runtime.lora.rate import product_flops_per_s

        form = plan.case.form
        flops = product_flops_per_s(form.quantization if form.kind != "float32" else None)
    return duration(
        plan,
        iters=left,
        validations=1 + left // asked.steps_per_eval,
        val_batches=asked.val_batches,
        flops_per_s=flops,
    )


def exceeded(plan: "FineTuningPlan", name: str) -> DoesNotFit:
    """The error that says what is missing, and what would fit."""
    from uma.report.fine_tuning import exceeds_text

    return DoesNotFit(exceeds_text(plan, name))
