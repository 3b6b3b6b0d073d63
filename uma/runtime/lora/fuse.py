"""An adapter added into the weights of its model, and how much of it is left there."""

import copy
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.tuner.dora import DoRAEmbedding, DoRALinear
from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear, LoRASwitchLinear

from uma.errors import StorageError, UnsupportedModel, UsageError
from uma.quantization import Quantization
from uma.runtime.convert import Shards, write_others
from uma.runtime.forms import as_dense, as_quantized, form_of, leaves, to_float32

Form = Quantization | Literal["stored", "dense"]
"""Of the fused matrices: as the base's, full precision, or quantized anew."""

_KINDS = (LoRALinear, LoRASwitchLinear, LoRAEmbedding, DoRALinear, DoRAEmbedding)


@dataclass(frozen=True, slots=True)
class Kept:
    """What is left of an adapter in a fused model, by logits.

    With the changes that adapter and fusion make to the base's logits (less the mean of each
    position, which no softmax sees): ``share`` is the fusion's along the adapter's, 1 when all is
    there and 0 when nothing is; ``error`` the distance of the two, as a part of the adapter's.
    """

    share: float
    error: float


def kept(base: mx.array, adapted: mx.array, fused: mx.array) -> Kept:
    """Compare three logits of the same positions, ``(positions, vocabulary)`` each.

    Raises:
        UsageError: If the adapter changes nothing, or one of them is not finite.
    """
    for name, logits in {"model": base, "adapter": adapted, "fused model": fused}.items():
        if not mx.isfinite(logits).all().item():
            raise UsageError(f"the {name} gives logits that are not finite: there is no use in it")
    base, adapted, fused = (x - x.mean(axis=-1, keepdims=True) for x in (base, adapted, fused))
    wanted, found = adapted - base, fused - base
    size: Any = mx.square(wanted).sum().item()
    if size == 0:
        raise UsageError("the adapter changes no logit: it is not trained")
    share: Any = (wanted * found).sum().item()
    error: Any = mx.square(found - wanted).sum().item()
    return Kept(share / size, float((error / size) ** 0.5))


def adapted_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that an adapter was put on, by path.

    Raises:
        UnsupportedModel: If one is of a kind that only its own model knows.
    """
    found = {path: module for path, module in model.named_modules() if hasattr(module, "fuse")}
    for path, module in found.items():
        if not isinstance(module, _KINDS):
            raise UnsupportedModel(f"{path} is a {type(module).__name__}, which is not fused here")
    return found


def fused(module: Any, form: Form) -> Any:
    """One module with its adapter added, in float32, then stored in ``form``.

    mlx-lm 0.32.2 adds in the width of the weights (``tuner/lora.py``, ``fuse``).

    Raises:
        UsageError: If the matrix does not split into groups of ``form``.
    """
    holder = "embedding" if "embedding" in module else "linear"
    base = base_of(module)
    plain = as_dense(base, None)
    wide = copy.copy(plain) if plain is base else as_dense(base, mx.float32)
    wide.set_dtype(mx.float32)
    module[holder] = wide
    try:
        new = module.fuse(dequantize=True)
    finally:
        module[holder] = base
    new.set_dtype(plain.weight.dtype)
    if form == "stored":
        form = "dense" if plain is base else quantization_of(base)
    if form == "dense":
        return new
    width = new.weight.shape[-1]
    if width % form.group_size:
        raise UsageError(f"a matrix {width} wide does not split into groups of {form.group_size}")
    return as_quantized(new, form.to_config())


def quantization_of(module: Any) -> Quantization:
    """The format of a quantized module."""
    return Quantization(module.bits, module.group_size, getattr(module, "mode", "affine"))


def base_of(module: Any) -> Any:
    """The module under an adapter."""
    return module["embedding" if "embedding" in module else "linear"]


def form_bytes(module: Any, form: Form) -> int | None:
    """Bytes of the matrix under an adapter, stored in ``form``; ``None`` if it cannot be."""
    plain = as_dense(base_of(module), None).weight  # not evaluated: its shape and width are known
    if not isinstance(form, Quantization):
        return int(plain.nbytes)
    whole = plain.shape[-1] % form.group_size == 0
    return form.matrix_bytes(plain.shape, plain.itemsize) if whole else None


class _OnCall(nn.Module):  # type: ignore[misc]
    """A matrix that is made at each call and dropped after it, so that one exists at a time."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.make = make

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.make()(*args, **kwargs)
        mx.eval(result)
        return result

    def as_linear(self, x: mx.array) -> Any:
        result = self.make().as_linear(x)
        mx.eval(result)
        return result


@contextmanager
def as_if_fused(model: nn.Module, stored: nn.Module, form: Form) -> Iterator[None]:
    """A block in which ``model`` computes what it would with the adapters of ``stored`` fused.

    ``stored`` is the model in its stored form; ``model`` may be the same, or hold float32.
    """
    same = model is stored
    own = adapted_modules(model)

    def making(module: nn.Module) -> Callable[[], Any]:
        return lambda: fused(module, form) if same else to_float32("", fused(module, form))

    made = {path: _OnCall(making(module)) for path, module in adapted_modules(stored).items()}
    model.update_modules(tree_unflatten(list(made.items())))
    try:
        yield
    finally:
        model.update_modules(tree_unflatten(list(own.items())))


def logits_of(model: nn.Module, rows: Sequence[Sequence[int]], last: int = 32) -> mx.array:
    """The float32 logits of the last positions of each row, one row after the other."""
    model.eval()
    found = []
    for row in rows:
        logits: Any = model(mx.array([list(row)]))
        found.append(logits[0, -last:].astype(mx.float32))
        mx.eval(found[-1])
    return mx.concatenate(found)


def write_fused(
    model: nn.Module,
    tokenizer_folder: Path,
    config: Mapping[str, Any],
    out_dir: Path,
    form: Form,
    verify: Callable[[Path], None],
    *,
    dense: bool = False,
) -> dict[str, Any]:
    """Write ``model`` with its adapters fused to ``out_dir``, whole or not at all; what it holds.

    Module after module leaves the model and memory for the file. With ``dense`` the matrices
    without adapter are dequantized too. ``verify`` is given the folder before it gets its name;
    what it raises leaves nothing behind.

    Raises:
        StorageError: If the disk has no room, or the folder cannot be written.
    """
    parent = out_dir.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out_dir.name[:80]}.", dir=parent))
        try:
            shards = Shards(temporary)
            for path, module in _outermost(model):
                whole = fused(module, form) if isinstance(module, _KINDS) else module
                shards.take(path, as_dense(whole, None) if dense else whole)
                model.update_modules(tree_unflatten([(path, nn.Identity())]))
            shards.finish(model)
            write_others(tokenizer_folder, temporary, model, _config(config, shards))
            temporary.chmod(0o755)
            verify(temporary)
            _rename_new(temporary, out_dir)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    except OSError as error:
        raise StorageError(f"{out_dir} cannot be written: {error.strerror or error}") from error
    return {"form": form_of(shards.format_bytes), "size_bytes": sum(shards.sizes)}


def _outermost(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Adapted modules whole, and the leaves outside them, in the order of the model."""
    adapted = adapted_modules(model)
    found: dict[str, nn.Module] = {}
    for path, module in leaves(model):
        outer = path.rpartition(".")[0]
        if outer in adapted:
            found[outer] = adapted[outer]
        else:
            found[path] = module
    return list(found.items())


def _config(config: Mapping[str, Any], shards: Shards) -> dict[str, Any]:
    """``config.json`` with the formats as they are now: the most common, and what differs."""
    left = {k: v for k, v in config.items() if k not in ("quantization", "quantization_config")}
    if not shards.formats:
        return left
    formats = list(shards.formats.values())
    common = max(formats, key=formats.count)
    own = {path: q.to_config() for path, q in shards.formats.items() if q != common}
    return left | {"quantization": common.to_config() | own}


def _rename_new(temporary: Path, out_dir: Path) -> None:
    """Give a finished folder its name, unless something has it by now."""
    if os.path.lexists(out_dir):
        raise StorageError(f"{out_dir} exists by now; what was fused is not written over it")
    temporary.rename(out_dir)
