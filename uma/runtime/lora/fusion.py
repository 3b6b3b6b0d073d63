"""A fusion from folder to folder, refused where it would lose what was trained."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from uma.errors import UmaError
from uma.quantization import Quantization
from uma.runtime.load import add_adapter, load, open_model
from uma.runtime.lora.fuse import (
    Form,
    Kept,
    adapted_modules,
    as_if_fused,
    base_of,
    form_bytes,
    kept,
    logits_of,
    write_fused,
)
from uma.units import format_gib

MIN_SHARE, MAX_ERROR = 0.9, 0.75
"""Of the adapter's change to the logits: at least kept, at most added."""


class AdapterLost(UmaError):
    """A fusion would not do what the adapter does; nothing was written."""


@dataclass(frozen=True, slots=True)
class Fusion:
    """What to write: the form of the matrices with an adapter, and whether all others are dense."""

    form: Form = "stored"
    dense: bool = False
    force: bool = False

    def __str__(self) -> str:
        if self.dense:
            return "--dequantize"
        return {"stored": "as stored", "dense": "--bits 16"}.get(str(self.form), f"{self.form}")


def fuse_adapter(
    folder: Path,
    adapter_path: Path,
    out_dir: Path,
    fusion: Fusion,
    rows: Sequence[Sequence[int]],
    *,
    float32: bool,
) -> dict[str, Any]:
    """Fuse the adapter into the model of ``folder`` and write it; what was written and kept.

    The logits on ``rows`` are compared before anything is written, and once more as the written
    folder gives them. With ``float32`` they are computed in that width, which a CPU is fast in.

    Raises:
        AdapterLost: If less than ``MIN_SHARE`` of the adapter's effect would be there, or an error
            of more than ``MAX_ERROR`` of it, unless ``fusion.force``.
        CheckpointError: If the adapter is not one of this model.
        StorageError: If the folder cannot be written.
    """
    dequantize_to = "float32" if float32 else None
    stored, config, base, adapted = _compared(folder, adapter_path, fusion, rows, dequantize_to)
    mx.clear_cache()
    found: list[Kept] = []

    def verify(written: Path) -> None:
        model = load(written, dequantize_to=dequantize_to).model
        found.append(kept(base, adapted, logits_of(model, rows)))
        if is_lost(found[0]) and not fusion.force:
            raise AdapterLost(f"the model as it was written {described(found[0])}; it is removed")

    written = write_fused(stored, folder, config, out_dir, fusion.form, verify, dense=fusion.dense)
    return written | {"kept_share": found[0].share, "error_share": found[0].error}


def _compared(
    folder: Path,
    adapter_path: Path,
    fusion: Fusion,
    rows: Sequence[Sequence[int]],
    dequantize_to: str | None,
) -> tuple[nn.Module, dict[str, Any], mx.array, mx.array]:
    """The model in its stored form with the adapter, its config, logits without and with it.

    Raises:
        AdapterLost: If the fusion would lose it.
    """
    loaded = load(folder, dequantize_to=dequantize_to)
    base = logits_of(loaded.model, rows)
    add_adapter(loaded.model, adapter_path)
    adapted = logits_of(loaded.model, rows)
    stored, config = loaded.model, loaded.config
    if dequantize_to is not None:
        stored, config = open_model(folder)
        add_adapter(stored, adapter_path)

    def keeps(form: Form) -> Kept:
        with as_if_fused(loaded.model, stored, form):
            return kept(base, adapted, logits_of(loaded.model, rows))

    found = keeps(fusion.form)
    if is_lost(found) and not fusion.force:
        raise AdapterLost(_refusal(fusion, found, _others(stored, fusion, keeps)))
    return stored, config, base, adapted


def is_lost(found: Kept) -> bool:
    """Whether a fusion is refused."""
    return found.share < MIN_SHARE or found.error > MAX_ERROR


def described(found: Kept) -> str:
    """The two figures in words; what is drowned by rounding may even point away."""
    share = max(found.share, 0.0)
    return f"keeps {share:.0%} of what the adapter does, with an error of {found.error:.0%}"


Alternatives = Mapping[str, tuple[Kept, int]]
"""What else could be written, by its option: what it keeps, and bytes of the fused matrices."""


def _others(stored: nn.Module, fusion: Fusion, keeps: Callable[[Form], Kept]) -> Alternatives:
    """Forms that hold more than the one that was asked for."""
    modules = adapted_modules(stored).values()
    quantized = any(hasattr(base_of(module), "bits") for module in modules)
    if fusion.form == "dense" or (fusion.form == "stored" and not quantized):
        return {}
    forms: dict[str, Form] = {"--bits 8": Quantization(8, 64), "--bits 16": "dense"}
    found = {}
    for name, form in forms.items():
        sizes = [form_bytes(module, form) for module in modules]
        if form != fusion.form and None not in sizes:
            found[name] = keeps(form), sum(size or 0 for size in sizes)
    return found


def _refusal(fusion: Fusion, found: Kept, others: Alternatives) -> str:
    lines = [
        f"{name}: {described(kept)}; these matrices then take {format_gib(size)}"
        for name, (kept, size) in others.items()
    ]
    if "--bits 16" in others:
        lines.append("--dequantize: all of the model in 16 bits")
    lines.append("uma run --adapter-path: model and adapter side by side, nothing lost")
    return (
        f"the fused model would lose the adapter: {fusion}, it {described(found)} (rounding "
        "swallows small changes). Nothing was written. Instead:\n  " + "\n  ".join(lines)
    )
