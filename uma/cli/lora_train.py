"""``uma lora train``: from its options to a trained adapter and a report."""

import json as json_module
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from uma.cli.progress import say
from uma.units import format_gib

if TYPE_CHECKING:
    from uma.dataset.check import Split
    from uma.dataset.examples import Example, Overlong
    from uma.runtime.load import LoadedModel
    from uma.runtime.lora.adapter import Method
    from uma.runtime.lora.run import Recipe, Result


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of ``uma lora train``, under their own names."""

    model: str | None
    data: Path
    adapter_path: Path
    fine_tune_type: "Method"
    num_layers: int
    rank: int
    scale: float
    dropout: float
    keys: list[str] | None
    iters: int
    epochs: int | None
    batch_size: int
    grad_accumulation_steps: int
    max_seq_length: int
    overlong: "Overlong"
    mask_prompt: bool
    packing: bool
    optimizer: str
    learning_rate: float
    warmup: int
    cosine: bool
    max_grad_norm: float | None
    seed: int
    steps_per_report: int
    steps_per_eval: int
    val_batches: int
    save_every: int
    resume: bool
    dequantize: str
    progress: str
    json: bool
    yes: bool
    wait: bool
    allow_concurrent: bool


def train_command(asked: Asked) -> None:
    """Check the data, load the model, train, report."""
    from uma.cli.lora_data import checked, tokenizer_of
    from uma.dataset.check import findings, require_examples
    from uma.paths import state_folder
    from uma.system.lock import heavy_command

    quiet = asked.json or asked.progress == "json"
    source, encoder = tokenizer_of(asked.model, quiet=quiet, yes=asked.yes)
    from uma.runtime.lora.run import require_free

    require_free(asked.adapter_path, asked.resume)
    splits = checked(
        asked.data,
        encoder,
        mask_prompt=asked.mask_prompt,
        max_seq_length=asked.max_seq_length,
        overlong=asked.overlong,
        quiet=quiet,
    )
    for name in ("train", "valid"):
        if name in splits:
            require_examples(splits[name])
    for line in findings(splits, asked.batch_size):
        say(f"note: {line}", quiet)
    with heavy_command(
        "uma lora train",
        state_folder(),
        wait=asked.wait,
        allow_concurrent=asked.allow_concurrent,
        on_wait=lambda holder: say(f"waiting for {holder}", quiet),
    ):
        assert source.path is not None
        loaded = _loaded(asked, source.path, quiet)
        result, stopped = _trained(asked, loaded, splits)
    _report(asked, source.name, loaded, result)
    if stopped:
        say(f"stopped; continue with the same command and --resume ({asked.adapter_path})", quiet)
        raise typer.Exit(130)


def _loaded(asked: Asked, folder: Path, quiet: bool) -> "LoadedModel":
    from uma.cli.progress import progress
    from uma.runtime.backend import backend
    from uma.runtime.load import load

    wide = asked.dequantize == "always" or (asked.dequantize == "auto" and backend() == "cpu")
    with progress("loading layers", quiet=quiet) as show:
        return load(folder, dequantize_to="float32" if wide else None, progress=show)


def _trained(
    asked: Asked, loaded: "LoadedModel", splits: "dict[str, Split]"
) -> "tuple[Result, bool]":
    from uma.paths import cache_folder
    from uma.runtime.blas import prepare_cpu
    from uma.runtime.lora.run import fine_tune

    train, valid = splits["train"], splits.get("valid")
    with _stop_signals() as stopped:
        result = fine_tune(
            loaded,
            train.fitted.examples,
            valid.fitted.examples if valid else (),
            _recipe(asked, train.fitted.examples),
            asked.adapter_path,
            resume=asked.resume,
            data=_data(asked, splits),
            blas=prepare_cpu(cache_folder()).name,
            on_event=_events(asked),
            stopped=stopped,
        )
        return result, stopped()


def _recipe(asked: Asked, examples: "Sequence[Example]") -> "Recipe":
    from uma.runtime.lora.adapter import Adapter
    from uma.runtime.lora.run import Recipe
    from uma.runtime.lora.train import Course, units_of

    iters = asked.iters
    pack_tokens = asked.max_seq_length if asked.packing else None
    if asked.epochs is not None:
        rows = len(units_of(examples, pack_tokens))
        iters = asked.epochs * -(-rows // asked.batch_size)
    return Recipe(
        adapter=Adapter(
            method=asked.fine_tune_type,
            num_layers=asked.num_layers,
            rank=asked.rank,
            scale=asked.scale,
            dropout=asked.dropout,
            keys=tuple(asked.keys) if asked.keys else None,
        ),
        course=Course(
            iters=iters,
            batch_size=asked.batch_size,
            grad_accumulation_steps=asked.grad_accumulation_steps,
            seed=asked.seed,
            max_grad_norm=asked.max_grad_norm,
            pack_tokens=pack_tokens,
            steps_per_report=asked.steps_per_report,
            steps_per_eval=asked.steps_per_eval,
            val_batches=asked.val_batches,
            save_every=asked.save_every,
        ),
        optimizer=asked.optimizer,
        learning_rate=asked.learning_rate,
        warmup=asked.warmup,
        cosine=asked.cosine,
    )


def _data(asked: Asked, splits: "dict[str, Split]") -> dict[str, Any]:
    import hashlib

    return {
        "train_data": hashlib.sha256(splits["train"].path.read_bytes()).hexdigest()[:16],
        "max_seq_length": asked.max_seq_length,
        "mask_prompt": asked.mask_prompt,
        "overlong": asked.overlong,
    }


def _events(asked: Asked) -> Callable[[dict[str, Any]], None]:
    if asked.progress == "json":
        return lambda event: print(json_module.dumps(event), file=sys.stderr, flush=True)
    return lambda event: say(_line(event), asked.json)


def _line(event: dict[str, Any]) -> str:
    at = f"iteration {event['iteration']:,}"
    if event["event"] == "validation":
        return f"{at}: validation loss {event['val_loss']:.3f}"
    if event["event"] == "checkpoint":
        return f"{at}: saved"
    return (
        f"{at}: loss {event['train_loss']:.3f}, {event['tokens_per_s']:,.0f} tokens/s, "
        f"peak {format_gib(event['peak_memory_bytes'])}"
    )


@contextmanager
def _stop_signals() -> Iterator[Callable[[], bool]]:
    """Ctrl-C, SIGTERM and SIGHUP ask for a checkpoint and an end; a second one ends at once."""
    seen: list[int] = []

    def handler(number: int, _: object) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)
        say("saving after this step; once more to leave at once")

    wanted = [signal.SIGINT, signal.SIGTERM, *filter(None, [getattr(signal, "SIGHUP", None)])]
    former = {number: signal.signal(number, handler) for number in wanted}
    try:
        yield lambda: bool(seen)
    finally:
        for number, before in former.items():
            signal.signal(number, before)


def _report(asked: Asked, name: str, loaded: "LoadedModel", result: "Result") -> None:
    if asked.json:
        print(json_module.dumps(_document(asked, name, loaded, result), indent=2))
        return
    for note in result.notes:
        print(f"note: {note}")
    done = result.progress
    parts = [
        f"{asked.adapter_path}: {done.iteration:,} iterations",
        f"{result.trainable_parameters:,} trained parameters",
    ]
    if done.train_loss is not None:
        parts.append(f"loss {done.train_loss:.3f}")
    if done.val_loss is not None:
        parts.append(f"validation loss {done.val_loss:.3f}")
    above = result.peak_memory_bytes - result.resting_bytes
    parts.append(
        f"peak {format_gib(result.peak_memory_bytes)}, {format_gib(above)} above the model"
    )
    print(", ".join(parts))


def _document(asked: Asked, name: str, loaded: "LoadedModel", result: "Result") -> dict[str, Any]:
    from uma.report import SCHEMA_VERSION
    from uma.runtime.versions import versions

    done = result.progress
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(asked).items()}
    return {
        "schema_version": SCHEMA_VERSION,
        "iters": done.iteration,
        "train_loss": done.train_loss,
        "val_loss": done.val_loss,
        "tokens_per_s": result.tokens_per_s,
        "s_per_iter": result.s_per_iter,
        "trained_tokens": done.trained_tokens,
        "trainable_parameters": result.trainable_parameters,
        "adapter_path": str(asked.adapter_path),
        "model": {"name": name, "form": loaded.form, "weights_bytes": loaded.weights_bytes},
        "settings": settings,
        "versions": versions(),
        "ledger": {
            "terms": [],
            "predicted_peak_bytes": None,
            "measured_peak_bytes": result.peak_memory_bytes,
            "resting_bytes": result.resting_bytes,
            "verdict": "unknown",
            "reason": "training is not yet planned before it begins",
        },
        "notes": list(result.notes),
    }
