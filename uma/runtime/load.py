"""Load a model layer by layer, in the form asked for: as stored, quantized, or float32."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten

from uma.errors import CheckpointError, UmaError, UnsupportedModel, UsageError
from uma.quantization import Quantization
from uma.runtime.limits import memory_limits

Progress = Callable[[int, int], None]
"""Called with the number of layers done and their total."""

_FLOATS = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}
_SLICE_ELEMENTS = 1 << 15
_FIRST_INDEX = re.compile(r"^.*?\.\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory. ``form`` names its numbers, such as ``affine 4/64`` or ``bfloat16``.

    ``weights_bytes`` counts all parameters, those of an adapter (``adapter_bytes``) included.
    """

    model: Any
    tokenizer: Any
    config: dict[str, Any]
    folder: Path
    form: str
    weights_bytes: int
    adapter_bytes: int = 0
    notes: tuple[str, ...] = ()


def load(
    folder: Path,
    *,
    quantization: Quantization | None = None,
    dequantize_to: str | None = None,
    dtype: str | None = None,
    adapter_path: Path | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load the model and tokenizer of an MLX or Hugging Face ``folder``.

    The numbers stay as stored, but for what is asked, in this order: ``dtype`` casts the
    floating-point parameters as ``mlx_lm.convert`` does, those of quantized matrices (scales)
    included; ``quantization`` quantizes the matrices that ``mlx_lm.convert`` would;
    ``dequantize_to="float32"`` makes every parameter float32. It is done one matrix at a time,
    so that the peak stays near one matrix above the result.

    Raises:
        CheckpointError: If a file is missing or malformed, or does not match ``config.json``.
        UnsupportedModel: If mlx-lm has no module for ``model_type``, or it needs remote code.
    """
    if dequantize_to not in (None, "float32"):
        raise ValueError(f"dequantize_to is 'float32' or None, got {dequantize_to!r}")
    model, config = _open(folder, trust_remote_code)
    notes = []
    if dtype is not None:
        _cast(model, dtype)
    stored = config.get("quantization")
    convert: list[Convert] = []
    if quantization is not None and (stored is None or _stored_form(stored) != quantization):
        convert.append(_quantizer(model, quantization))
        if stored is not None:
            notes.append(f"requantized from {form_name(model)}")
    if dequantize_to is not None:
        convert.append(_to_float32)
    try:
        # With a pool, lasting arrays would take over freed buffers of up to twice their size.
        with memory_limits(cache=0):
            _materialize(model, convert, progress)
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"the weights in {folder} cannot be read: {error}") from error
    adapter_bytes = 0 if adapter_path is None else _add_adapter(model, adapter_path)
    return LoadedModel(
        model=model,
        tokenizer=_open_tokenizer(folder, config, trust_remote_code),
        config=config,
        folder=folder,
        form=form_name(model),
        weights_bytes=weights_bytes(model),
        adapter_bytes=adapter_bytes,
        notes=tuple(notes),
    )


def weights_bytes(model: nn.Module) -> int:
    """Bytes of all parameters, evaluated or not."""
    return sum(p.nbytes for _, p in tree_flatten(model.parameters()))


def form_name(model: nn.Module) -> str:
    """The number formats of a model's matrices, the one that holds most bytes first."""
    sizes: dict[str, int] = {}
    for module in dict(_leaves(model)).values():
        weight = module.get("weight")
        if weight is None or weight.ndim < 2:
            continue
        bits = getattr(module, "bits", None)
        name = str(weight.dtype).removeprefix("mlx.core.")
        if bits is not None:
            name = f"{getattr(module, 'mode', 'affine')} {bits}/{module.group_size}"
        sizes[name] = sizes.get(name, 0) + weight.nbytes
    return " + ".join(sorted(sizes, key=sizes.__getitem__, reverse=True)) or "no matrices"


def _open(folder: Path, trust_remote_code: bool) -> tuple[Any, dict[str, Any]]:
    """mlx-lm's module for the folder, its parameters not yet read from disk."""
    from mlx_lm.utils import load_model

    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json; give a folder that holds a model")
    try:
        model, config = load_model(folder, lazy=True, trust_remote_code=trust_remote_code)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder} has no model*.safetensors; download the weights or convert the model first"
        ) from error
    except ValueError as error:
        raise _refusal(folder, str(error)) from error
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"config.json in {folder} does not describe its model: {error!r}"
        ) from error
    except RuntimeError as error:
        raise CheckpointError(f"the weights in {folder} cannot be read: {error}") from error
    return model, config


def _refusal(folder: Path, text: str) -> UmaError:
    """mlx-lm's ``ValueError`` in our tree, its lists of parameter names cut short."""
    first = text.strip().splitlines()[0] if text.strip() else "no reason given"
    if "not supported" in first and "Model type" in first:
        return UnsupportedModel(
            f"{first} mlx-lm has no module of that name; it may need a newer one"
        )
    if "custom module" in first:
        return UnsupportedModel(f"the model in {folder} needs its own Python code; it is not run")
    return CheckpointError(f"the model in {folder} cannot be built: {first[:300]}")


def _cast(model: nn.Module, dtype: str) -> None:
    """Cast floating-point parameters lazily, but for those that the module keeps (as convert)."""
    if dtype not in _FLOATS:
        raise UsageError(f"unknown dtype {dtype!r}; allowed: {', '.join(_FLOATS)}")
    allowed = getattr(model, "cast_predicate", lambda _: True)

    def cast(path: str, value: mx.array) -> mx.array:
        floating = mx.issubdtype(value.dtype, mx.floating)
        return value.astype(_FLOATS[dtype]) if floating and allowed(path) else value

    model.update(tree_map_with_path(cast, model.parameters()))


def _stored_form(stored: dict[str, Any]) -> Quantization:
    return Quantization(stored["bits"], stored["group_size"], stored.get("mode", "affine"))


def _leaves(model: nn.Module) -> list[tuple[str, nn.Module]]:
    leaves: list[tuple[str, nn.Module]] = tree_flatten(
        model.leaf_modules(), is_leaf=nn.Module.is_module
    )
    return leaves


Convert = Callable[[str, nn.Module], nn.Module]


def _materialize(model: nn.Module, convert: list[Convert], progress: Progress | None) -> None:
    """Read, convert and replace one module after another; no source outlives its own turn.

    Evaluating all at once would hold every source until the end (mlx-lm's ``lazy`` path does).
    """
    layers = _by_layer([path for path, _ in _leaves(model)])
    for done, paths in enumerate(layers, start=1):
        for path in paths:
            module = _at(model, path)
            for step in convert:
                module = step(path, module)
            model.update_modules(tree_unflatten([(path, module)]))
            mx.eval(module.parameters())
            del module
        if progress is not None:
            progress(done, len(layers))
    if _to_float32 in convert:
        model.set_dtype(mx.float32)
    mx.eval(model.parameters())


def _by_layer(paths: list[str]) -> list[list[str]]:
    """Paths grouped by layer, after those outside the layers, each of which stands alone.

    Embedding and head, the largest matrices, are converted while nothing else is held.
    """
    outside = [[path] for path in paths if not _FIRST_INDEX.match(path)]
    layers: dict[str, list[str]] = {}
    for path in paths:
        if match := _FIRST_INDEX.match(path):
            layers.setdefault(match[0], []).append(path)
    return outside + list(layers.values())


def _at(model: nn.Module, path: str) -> Any:
    node: Any = model
    for part in path.split("."):
        node = node[int(part)] if isinstance(node, list) else node[part]
    return node


def _quantizer(model: nn.Module, quantization: Quantization) -> Convert:
    """Quantize what ``mlx_lm.utils.quantize_model`` (0.32.2) quantizes, and as it does."""
    predicate = getattr(model, "quant_predicate", None)
    asked = {
        "bits": quantization.bits,
        "group_size": quantization.group_size,
        "mode": quantization.mode,
    }

    def convert(path: str, module: nn.Module) -> nn.Module:
        module = _dense(module, None)
        if not hasattr(module, "to_quantized"):
            return module
        if module.weight.shape[-1] % quantization.group_size != 0:
            return module
        verdict = True if predicate is None else predicate(path, module)
        if not verdict:
            return module
        return _quantized(module, verdict if isinstance(verdict, dict) else asked)

    return convert


def _quantized(module: Any, options: dict[str, Any]) -> Any:
    """The module quantized; in slices of rows where MLX's CPU backend would take 20 times the size.

    It composes mxfp4, mxfp8 and nvfp4 from array operations (mlx 0.32.4, ``fast.cpp``,
    ``fp_quantize``); rows do not depend on each other.
    """
    new = module.to_quantized(**options)
    rows = _SLICE_ELEMENTS // module.weight.shape[-1] + 1
    flat = module.weight.reshape(-1, module.weight.shape[-1])
    if options.get("mode", "affine") == "affine" or mx.default_device() == mx.gpu:
        return new
    if options.get("global_scale") or flat.shape[0] <= rows:
        return new
    parts = []
    for start in range(0, flat.shape[0], rows):
        parts.append(mx.quantize(flat[start : start + rows], **options))
        mx.eval(parts[-1])
    for name, pieces in zip(("weight", "scales"), zip(*parts, strict=True), strict=True):
        setattr(new, name, mx.concatenate(list(pieces)).reshape(new[name].shape))
    return new


def _to_float32(_: str, module: nn.Module) -> nn.Module:
    module = _dense(module, mx.float32)
    module.set_dtype(mx.float32)
    return module


def _dense(module: Any, dtype: mx.Dtype | None) -> Any:
    """A quantized module as its full-precision class with equal values; others unchanged."""
    dense: Any = next((new for old, new in _dense_classes() if type(module) is old), None)
    if dense is None:
        return module
    scales, biases = module.scales, module.get("biases")
    if dtype is not None and module.mode == "affine":
        scales, biases = scales.astype(dtype), biases.astype(dtype)
    extra = {"global_scale": module.global_scale} if module.get("global_scale") is not None else {}
    new = dense.__new__(dense)
    nn.Module.__init__(new)
    new.weight = mx.dequantize(
        module.weight,
        scales,
        biases,
        module.group_size,
        module.bits,
        module.mode,
        dtype=dtype,
        **extra,
    )
    if "bias" in module:
        new.bias = module.bias
    return new


def _dense_classes() -> Iterator[tuple[type, type]]:
    from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

    yield nn.QuantizedLinear, nn.Linear
    yield nn.QuantizedEmbedding, nn.Embedding
    yield QuantizedSwitchLinear, SwitchLinear
    yield QuantizedMultiLinear, MultiLinear


def _add_adapter(model: nn.Module, adapter_path: Path) -> int:
    """Put a LoRA, DoRA or fully tuned adapter on the model; its bytes."""
    from mlx_lm.utils import load_adapters

    before = weights_bytes(model)
    try:
        load_adapters(model, str(adapter_path))
    except (OSError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"the adapter {adapter_path} cannot be used: {error}") from error
    model.eval()
    mx.eval(model.parameters())
    return weights_bytes(model) - before


def _open_tokenizer(folder: Path, config: dict[str, Any], trust_remote_code: bool) -> Any:
    from mlx_lm.utils import load_tokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    try:
        return load_tokenizer(
            folder,
            {"trust_remote_code": trust_remote_code},
            eos_token_ids=config.get("eos_token_id"),
        )
    except Exception as error:  # the tokenizers library raises bare Exception
        raise CheckpointError(f"the tokenizer in {folder} cannot be read: {error}") from error
