"""From the options of ``uma run`` to a loaded model: plan, confirm, fetch, convert, lock, load."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from uma.cli.options import RunOptions
from uma.cli.plan import (
    Planned,
    asked_quantization,
    exceeded,
    located,
    of_draft,
    plan_of,
    planned_beside,
)
from uma.cli.progress import progress, say
from uma.errors import RuntimeUnavailable, Unconfirmed, UsageError
from uma.units import format_gib

if TYPE_CHECKING:
    from uma.checkpoint.source import ModelSource
    from uma.machine import Machine
    from uma.plan.inference import InferencePlan
    from uma.runtime.session import Session


@dataclass(frozen=True, slots=True)
class Ready:
    """A session with what was decided on the way to it."""

    session: "Session"
    planned: Planned
    blas: str


Check = Callable[["InferencePlan", Any], None]
"""Called with the plan and the tokenizer before the weights are read: it raises what is wrong."""


@contextmanager
def ready(
    chosen: RunOptions, command: str = "uma run", check: Check | None = None
) -> Iterator[Ready]:
    """The model of ``chosen``, loaded within its plan.

    Raises:
        DoesNotFit: If the plan exceeds the limit; before a download where that is known.
    """
    blas = require_mlx(chosen.quiet)
    from uma.paths import state_folder
    from uma.system.lock import heavy_command

    template_config(chosen)  # refused now rather than after loading
    source = located(chosen)
    if source.path is None and source.config is not None:
        require_fit(chosen, plan_of(chosen, source, live_machine()), quiet=True)
    source = on_disk(chosen, source)
    draft = None
    if chosen.draft_model is not None:
        asked = of_draft(chosen)
        draft = on_disk(asked, located(asked))
    with heavy_command(
        command,
        state_folder(),
        wait=chosen.wait,
        allow_concurrent=chosen.allow_concurrent,
        on_wait=lambda holder: say(f"waiting for {holder}", chosen.quiet),
    ) as note:
        if note is not None:
            say(f"note: {note}", chosen.quiet)
        machine = live_machine()
        beside = planned_beside(chosen, draft, machine, timed=True)
        planned = plan_of(chosen, source, machine, beside, timed=True)
        require_fit(chosen, planned, quiet=chosen.quiet)
        tell_plan(chosen, planned)
        with _loaded(chosen, planned, draft, check) as session:
            yield Ready(session, planned, blas)


@contextmanager
def _loaded(
    chosen: RunOptions, planned: Planned, draft: "ModelSource | None", check: Check | None
) -> "Iterator[Session]":
    from uma.runtime.generate import sampling_defaults
    from uma.runtime.session import open_session

    folder = planned.source.path
    assert folder is not None

    def before_weights(tokenizer: Any) -> None:
        sampling_defaults(folder)
        if check is not None:
            check(planned.plan, tokenizer)

    with (
        progress("loading layers", quiet=chosen.quiet) as show,
        open_session(
            planned.plan,
            folder,
            wire=chosen.wire,
            adapter_path=chosen.adapter_path,
            draft_folder=None if draft is None else draft.path,
            progress=show,
            on_tokenizer=before_weights,
        ) as session,
    ):
        for line in (*session.limits.notes, *session.loaded.notes):
            say(f"note: {line}", chosen.quiet)
        if chosen.kv_bits is not None:
            say(f"KV cache: {session.cache.summary}", chosen.quiet)
        yield session


def require_mlx(quiet: bool) -> str:
    """Make MLX ready to be imported; the BLAS under its CPU backend.

    Raises:
        RuntimeUnavailable: If it is not installed or has no build for this machine.
    """
    import platform
    from importlib.util import find_spec

    if find_spec("mlx") is None or find_spec("mlx_lm") is None:
        system = platform.system()
        if system == "Linux":
            raise RuntimeUnavailable(
                "running models needs MLX, which uma's extra `run` brings: pip install 'mlx[cpu]' "
                "mlx-lm gguf cmeel-openblas. Estimates (--dry-run) work without"
            )
        if system == "Darwin" and platform.machine() == "arm64":
            raise RuntimeUnavailable("running models needs MLX: pip install mlx mlx-lm")
        raise RuntimeUnavailable(
            f"MLX has no build for {system} on {platform.machine()}: models can be estimated here "
            "(--dry-run), and run with llama.cpp (--emit llama-server)"
        )
    from uma.paths import cache_folder
    from uma.runtime.blas import prepare_cpu

    blas = prepare_cpu(cache_folder())
    if blas.reason is not None:
        say(f"note: {blas.reason}", quiet)
    from uma.system.nvidia import read_cards

    if sys.platform == "linux" and read_cards():
        say(
            "note: MLX runs on the CPU here; for the NVIDIA card beside it use llama.cpp "
            "(--emit llama-server), vLLM, or mlx[cuda]",
            quiet,
        )
    return blas.name


def live_machine() -> "Machine":
    """This machine, calibrated, its limit as Metal itself tells it where there is Metal."""
    from uma.cli.calibrated import calibrated
    from uma.machine import read_machine

    if sys.platform != "darwin":
        return calibrated(read_machine())
    from uma.runtime.limits import device_facts

    return calibrated(read_machine(device_facts()))


def require_fit(chosen: RunOptions, planned: Planned, *, quiet: bool) -> None:
    """Go on if the plan fits or is forced, saying so unless ``quiet``."""
    if planned.plan.verdict != "exceeds":
        return
    error = exceeded(planned)
    if not chosen.force:
        raise error
    say(f"uma: going on although {error.args[0].splitlines()[0]}", quiet)


def on_disk(chosen: RunOptions, source: "ModelSource") -> "ModelSource":
    """The source as a folder that mlx-lm loads: downloaded and converted where it is not."""
    from uma.checkpoint.source import fetch

    if source.path is None:
        source = confirmed(chosen, source)
        with progress("downloading", quiet=chosen.quiet, sizes=True) as show:
            source = fetch(source, progress=show)
    if source.gguf_headers:
        source = converted(chosen, source)
    return source


def confirmed(chosen: RunOptions, source: "ModelSource") -> "ModelSource":
    """The source with its download size, after a person, ``--yes`` or the default agreed to it.

    The default model is what ``uma run`` is asked to fetch by naming none.

    Raises:
        Unconfirmed: If nobody could be asked, or said no.
    """
    from uma.checkpoint.hub_cache import cache_folder as hub_cache_folder
    from uma.checkpoint.source import probe

    if source.kind == "default":
        size = source.download_bytes or 0
        say(f"fetching {source.name} once: {format_gib(size)}", chosen.quiet)
        return source
    source = probe(source)
    size = source.download_bytes or 0
    what = f"{source.repo} is {format_gib(size)} to download to {hub_cache_folder()}"
    if source.config is not None:
        require_fit(chosen, plan_of(chosen, source, live_machine()), quiet=True)
    if chosen.yes:
        say(what, chosen.quiet)
        return source
    terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()
    if not terminal:
        raise Unconfirmed(f"{what}; say --yes to go on, or give a local folder")
    print(f"{what}. Go on? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise Unconfirmed(f"{source.repo} was not downloaded")
    return source


def converted(chosen: RunOptions, source: "ModelSource") -> "ModelSource":
    """A GGUF source as the folder that it was converted to, once."""
    from uma.checkpoint.source import locate
    from uma.paths import cache_folder
    from uma.runtime.gguf.convert import converted_folder, planned_config

    assert source.path is not None
    asked = asked_quantization(chosen)
    for note in planned_config(source.gguf_headers[0], asked)[1]:
        say(f"note: {note}", chosen.quiet)
    with progress("converting", quiet=chosen.quiet, sizes=True) as show:
        folder = converted_folder(
            source.path,
            cache_folder() / "converted",
            quantization=asked,
            progress=show,
        )
    return replace(locate(str(folder)), name=source.name, kind=source.kind)


def tell_plan(chosen: RunOptions, planned: Planned) -> None:
    """One line before loading; the whole plan with ``--verbose``."""
    from uma.report.plan import plan_text, settings_text

    plan = planned.plan
    if chosen.verbose:
        say(plan_text(plan, planned.source.name) + "\n")
        return
    peak, budget = plan.ledger.predicted_peak_bytes, plan.budget.budget_bytes
    say(
        f"{planned.source.name}: {settings_text(plan)}, peak {format_gib(peak)} of "
        f"{format_gib(budget)}: {plan.verdict}",
        chosen.quiet,
    )
    for note in (*plan.machine.notes, *plan.notes):
        say(f"note: {note}", chosen.quiet)


def template_config(chosen: RunOptions) -> dict[str, Any] | None:
    """The object of ``--chat-template-config``.

    Raises:
        UsageError: If it is no JSON object.
    """
    import json

    if chosen.chat_template_config is None:
        return None
    try:
        value = json.loads(chosen.chat_template_config)
    except ValueError as error:
        raise UsageError(f"--chat-template-config is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UsageError('--chat-template-config must be a JSON object, such as {"key": true}')
    return value
