"""``uma doctor``: is this installation sound, and do its predictions hold on this machine."""

import json as json_module
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from uma.cli import options as opt
from uma.cli.calibrated import calibration_folder
from uma.cli.options import RunOptions, chosen_model
from uma.cli.progress import progress, say

if TYPE_CHECKING:
    from uma.cli.session import Ready
    from uma.machine import Machine
    from uma.measurement.checks import Check
    from uma.measurement.trial import Trial
    from uma.report.doctor import DoctorReport

QUESTION, ANSWER = "What is the capital of France?", "Paris"
ANSWER_TOKENS = 32
REPETITIONS = 5  # of the kernels of bandwidth: a minute is too long for a self-check


def doctor(
    context: typer.Context,
    model_argument: opt.Model = None,
    model: opt.ModelOption = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only the checks; nothing is run.")
    ] = False,
    bundle: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a bundle for a bug report, without names."),
    ] = None,
    forget: Annotated[
        bool, typer.Option("--forget", help="Remove the calibration of this machine, and end.")
    ] = False,
    no_record: Annotated[bool, typer.Option("--no-record", help="Keep no calibration.")] = False,
    json: opt.Json = False,
    yes: opt.Yes = False,
    wait: opt.Wait = False,
    allow_concurrent: opt.AllowConcurrent = False,
) -> None:
    """Check this installation, hold predictions against measurements, calibrate.

    A tiny random model of each kind of cache is run, then MODEL: the small default one, if it is
    here or --yes fetches it. The memory bandwidth and what the process holds beside MLX are kept
    and used by later estimates on this machine; --forget removes them.

    \b
    Examples:
      uma doctor
      uma doctor --yes --bundle report.json
      uma doctor --forget
    """
    if forget:
        print(_forgotten())
        return
    chosen = RunOptions(
        model=chosen_model(context, model_argument, model),
        quiet=True,
        yes=yes,
        wait=wait,
        allow_concurrent=allow_concurrent,
    )
    report = _checked()
    if not quick:
        report = _measured(chosen, report)
        if not no_record:
            report = _kept(report)
    if bundle is not None:
        _write_bundle(bundle, report)
    from uma.report.doctor import doctor_json, doctor_text

    print(json_module.dumps(doctor_json(report), indent=2) if json else doctor_text(report))
    raise typer.Exit(int(report.failed))


def _forgotten() -> str:
    from uma.machine.calibration import forget

    count = forget(calibration_folder())
    return f"{count} calibrations removed" if count else "there was no calibration"


def _checked() -> "DoctorReport":
    from uma.cli.bandwidth import is_busy, this_machine
    from uma.report.doctor import DoctorReport
    from uma.runtime.versions import versions

    machine = this_machine()
    checks = list(_checks(machine))
    if find_spec("mlx") is not None:
        checks.append(_device())
    return DoctorReport(machine, versions() | _others(), checks, busy=is_busy())


def _others() -> dict[str, str | None]:
    from uma.measurement.checks import installed_versions

    return {name.replace("-", "_"): number for name, number in installed_versions().items()}


def _checks(machine: "Machine") -> "Iterator[Check]":
    from uma.machine import budget_of
    from uma.measurement import checks
    from uma.paths import cache_folder, state_folder

    installed = checks.installed_versions()
    yield checks.check_python(machine)
    yield checks.check_packages(installed)
    yield from checks.check_known_bad(installed, machine)
    yield from checks.check_memory(machine, budget_of(machine))
    yield checks.check_disk("models", cache_folder())
    yield checks.check_disk("records", state_folder())
    yield checks.check_hub()
    yield checks.check_processes()


def _device() -> "Check":
    """Whether MLX can be imported and multiplies, on which device and with which BLAS."""
    from uma.cli.session import require_mlx
    from uma.errors import UmaError
    from uma.measurement.checks import Check

    try:
        blas = require_mlx(quiet=True)
        from uma.runtime.doctor import check_device
    except (ImportError, UmaError) as error:
        return Check(
            "device",
            "failure",
            f"MLX cannot be imported: {error}",
            "pip install -U --force-reinstall mlx",
        )
    return check_device(blas)


def _measured(chosen: RunOptions, report: "DoctorReport") -> "DoctorReport":
    """The report with what was run. Everything heavy stands under the lock."""
    from uma.paths import state_folder
    from uma.system.lock import heavy_command

    able = not report.failed and find_spec("mlx_lm") is not None
    with heavy_command(
        "uma doctor",
        state_folder(),
        wait=chosen.wait,
        allow_concurrent=chosen.allow_concurrent,
        on_wait=lambda holder: say(f"waiting for {holder}"),
    ) as note:
        if note is not None:
            report = _noted(report, note)
        if able:
            report = _with_tiny_models(report)
        report = _with_bandwidth(report)
    if not able:
        return _noted(report, "no model was run: MLX is missing, or a check failed")
    report = _with_model(chosen, report)
    return replace(report, checks=(*report.checks, _predictions(report.trials)))


def _noted(report: "DoctorReport", note: str) -> "DoctorReport":
    return replace(report, notes=(*report.notes, note))


def _with_bandwidth(report: "DoctorReport") -> "DoctorReport":
    from uma.cli.bandwidth import machine_bandwidth
    from uma.errors import UmaError

    say("measuring the memory bandwidth")
    try:
        return replace(report, bandwidth=machine_bandwidth(report.machine, REPETITIONS))
    except UmaError as error:
        return _noted(report, f"the memory bandwidth was not measured: {error}")


def _with_tiny_models(report: "DoctorReport") -> "DoctorReport":
    """What each tiny model showed; one that cannot be run is a failed check."""
    import tempfile

    from uma.cli.session import live_machine
    from uma.measurement.checks import Check
    from uma.runtime.doctor import tiny_models, try_kind

    models = tiny_models()
    say(f"running {len(models)} tiny models, one of each kind of cache")
    machine = live_machine()
    trials, failed = [], []
    with tempfile.TemporaryDirectory() as folder, progress("tiny model") as show:
        for done, (kind, config) in enumerate(models.items()):
            show(done, len(models))
            try:
                trials.append(try_kind(kind, config, machine, Path(folder) / kind))
            except Exception as error:  # whatever MLX or mlx-lm raises here is what is looked for
                text = f"a model of kind {kind!r} does not run: {type(error).__name__}: {error}"
                failed.append(Check("models", "failure", text, "report this with --bundle"))
        show(len(models), len(models))
    return replace(report, checks=(*report.checks, *failed), trials=tuple(trials))


def _with_model(chosen: RunOptions, report: "DoctorReport") -> "DoctorReport":
    """The model that was asked for, or the default one if it is here or may be fetched, run."""
    from uma.cli.plan import located

    source = located(chosen)
    if source.path is None and not chosen.yes:
        return _noted(
            report, f"{source.name} is not on this disk and was not run; --yes fetches it"
        )
    from uma.cli.session import ready
    from uma.measurement.trial import GENERATION_TOKENS, PROMPT_TOKENS

    say(f"running {source.name}")
    chosen = replace(chosen, context=PROMPT_TOKENS + GENERATION_TOKENS, prompt_tokens=PROMPT_TOKENS)
    with ready(chosen, "uma doctor") as have:
        from uma.cli.bench import row_of
        from uma.records import model_name
        from uma.runtime.bench import bench
        from uma.runtime.doctor import try_session
        from uma.runtime.session import bench_ledger

        name = model_name(source.name, local=source.repo is None and source.kind != "default")
        trial = try_session(name, have.session)
        checks = report.checks
        if source.kind == "default":
            checks = (*checks, _answer(have))
        result = bench(
            have.session.loaded,
            prompt_tokens=PROMPT_TOKENS,
            generation_tokens=GENERATION_TOKENS,
            num_trials=1,
        )
        row = row_of(have, result, bench_ledger(have.session, result))
    return replace(report, checks=checks, trials=(*report.trials, trial), rows=(row,))


def _answer(have: "Ready") -> "Check":
    """Whether the default model still knows a capital: wrong products show in what it says."""
    from uma.measurement.checks import Check
    from uma.runtime.doctor import said

    text = said(have.session, QUESTION, ANSWER_TOKENS)
    if ANSWER in text:
        return Check("answer", "ok", f"the default model answers {ANSWER!r}, as it should")
    return Check(
        "answer",
        "failure",
        f"the default model does not answer {ANSWER!r}: MLX may compute wrong numbers here",
        "update MLX, and report this with --bundle",
    )


def _predictions(trials: "Sequence[Trial]") -> "Check":
    from uma.measurement.checks import Check
    from uma.measurement.trial import rows_of

    rows = [row for trial in trials for row in rows_of(trial)]
    wrong = sorted({row.model for row in rows if row.basis == "exact" and row.holds is False})
    if wrong:
        return Check(
            "terms",
            "failure",
            f"exact terms are not what was measured: {', '.join(wrong)}",
            "report this with --bundle: a version of mlx-lm may hold its caches otherwise",
        )
    return Check("terms", "ok", "weights and caches are as large as predicted, to the byte")


def _kept(report: "DoctorReport") -> "DoctorReport":
    """The report with the calibration that follows from it, which is kept on this machine."""
    from uma.machine.calibration import calibration_record
    from uma.measurement.calibrate import calibration_from
    from uma.records import write_record

    today = time.strftime("%Y-%m-%d")
    found = calibration_from(report.bandwidth, report.trials, today, busy=report.busy)
    record = calibration_record(found, report.machine, dict(report.versions))
    note = write_record(record, calibration_folder()).note
    return replace(report, calibration=found) if note is None else _noted(report, note)


def _write_bundle(path: Path, report: "DoctorReport") -> None:
    """Write what a bug report needs.

    Raises:
        StorageError: If it cannot be written.
    """
    from uma.errors import StorageError
    from uma.measurement.bundle import bundle, read_system
    from uma.report.doctor import doctor_json

    info = None
    if report.machine.backend == "metal" and find_spec("mlx") is not None:
        from uma.runtime.limits import device_facts

        info = device_facts()
    document = bundle(doctor_json(report), read_system(), info, time.strftime("%Y-%m-%d"))
    try:
        path.write_text(json_module.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"--bundle {path}: {error.strerror}") from None
    say(f"bundle written to {path}; it holds no names, serial numbers or paths")
