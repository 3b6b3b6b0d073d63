"""Load a model layer by layer, in the form asked for: as stored, quantized, or float32."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten

from uma.checkpoint import Progress
from uma.checkpoint.adapter import CONFIG, WEIGHTS
from uma.errors import CheckpointError, UmaError, UnsupportedModel, UsageError
from uma.quantization import Quantization
from uma.runtime.forms import Convert, form_name, leaves, quantizer, to_float32
from uma.runtime.limits import memory_limits
from uma.runtime.rotation import share_rotations

_FLOATS = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}
_REASON = 300  # characters of mlx-lm's own list of names that are shown
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
    on_tokenizer: Callable[[Any], None] | None = None,
) -> LoadedModel:
    """Load the model and tokenizer of an MLX or Hugging Face ``folder``.

    The numbers stay as stored, but for what is asked, in this order: ``dtype`` casts the
    floating-point parameters as ``mlx_lm.convert`` does, those of quantized matrices (scales)
    included; ``quantization`` quantizes the matrices that ``mlx_lm.convert`` would;
    ``dequantize_to="float32"`` makes every parameter float32. It is done one matrix at a time,
    so that the peak stays near one matrix above the result. ``on_tokenizer`` is called with the
    tokenizer before any weights are read: what it raises costs no time.

    Raises:
        CheckpointError: If a file is missing or malformed, or does not match ``config.json``.
        UnsupportedModel: If mlx-lm has no module for ``model_type``, or it needs remote code.
    """
    if dequantize_to not in (None, "float32"):
        raise ValueError(f"dequantize_to is 'float32' or None, got {dequantize_to!r}")
    _look_for_compiler()
    model, config = open_model(folder, trust_remote_code)
    tokenizer = open_tokenizer(folder, config, trust_remote_code)
    if on_tokenizer is not None:
        on_tokenizer(tokenizer)
    notes = []
    if dtype is not None:
        cast_parameters(model, dtype)
    stored = config.get("quantization")
    convert: list[Convert] = []
    if quantization is not None and (stored is None or _stored_form(stored) != quantization):
        convert.append(quantizer(model, quantization))
        if stored is not None:
            notes.append(f"requantized from {form_name(model)}")
    if dequantize_to is not None:
        convert.append(to_float32)
    materialize(model, folder, convert, progress)
    adapter_bytes = 0 if adapter_path is None else add_adapter(model, adapter_path)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        config=config,
        folder=folder,
        form=form_name(model),
        weights_bytes=weights_bytes(model),
        adapter_bytes=adapter_bytes,
        notes=tuple(notes),
    )


def _look_for_compiler() -> None:
    """Let MLX's CPU backend look for one now: meanwhile, once a process, it ignores Ctrl-C.

    ``system`` does so (mlx 0.32.4, ``JitCompiler::available``).
    """
    mx.compile(lambda x: x)(mx.array(0))


def weights_bytes(model: nn.Module) -> int:
    """Bytes of all parameters, evaluated or not."""
    return sum(p.nbytes for _, p in tree_flatten(model.parameters()))


def open_model(folder: Path, trust_remote_code: bool = False) -> tuple[Any, dict[str, Any]]:
    """mlx-lm's module for the folder, its parameters not yet read from disk; its config.

    Raises:
        CheckpointError, UnsupportedModel: As ``load``.
    """
    from mlx_lm.utils import load_model

    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json; give a folder that holds a model")
    try:
        model, config = load_model(folder, lazy=True, trust_remote_code=trust_remote_code)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder} has no model*.safetensors; download the weights or convert the model first"
        ) from error
    except json.JSONDecodeError as error:
        raise CheckpointError(f"config.json in {folder} is not JSON: {error}") from error
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
    first = " ".join(text.split()) or "no reason given"
    if "not supported" in first and "Model type" in first:
        return UnsupportedModel(
            f"{first} mlx-lm has no module of that name; it may need a newer one"
        )
    if "custom module" in first:
        return UnsupportedModel(f"the model in {folder} needs its own Python code; it is not run")
    more = "" if len(first) <= _REASON else " ..."
    return CheckpointError(
        f"the weights in {folder} are not those of its config.json: {first[:_REASON]}{more}; "
        "download the model's files once more"
    )


def cast_parameters(model: nn.Module, dtype: str) -> None:
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


def materialize(
    model: nn.Module, folder: Path, convert: list[Convert], progress: Progress | None
) -> None:
    """Read, convert and replace one module after another; no source outlives its own turn.

    Evaluating all at once would hold every source until the end (mlx-lm's ``lazy`` path does).

    Raises:
        CheckpointError: If the weights of ``folder`` cannot be read.
    """
    try:
        # With a pool, lasting arrays would take over freed buffers of up to twice their size.
        with memory_limits(cache=0):
            _materialize(model, convert, progress)
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"the weights in {folder} cannot be read: {error}") from error


def _materialize(model: nn.Module, convert: list[Convert], progress: Progress | None) -> None:
    layers = _by_layer([path for path, _ in leaves(model)])
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
    if to_float32 in convert:
        model.set_dtype(mx.float32)
        if mx.default_device() == mx.cpu:
            share_rotations(model)
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


def add_adapter(model: nn.Module, adapter_path: Path) -> int:
    """Put a LoRA, DoRA or fully tuned adapter on the model; its bytes.

    Raises:
        CheckpointError: If the folder holds no adapter of mlx-lm's, one of another model, or one
            that is not finite.
    """
    from mlx_lm.utils import load_adapters

    before = weights_bytes(model)
    try:
        _require_own_format(adapter_path / CONFIG)
        load_adapters(model, str(adapter_path))
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RuntimeError) as error:
        lines = str(error).splitlines()
        shown = "\n  ".join(lines[:3]) + (f" (and {len(lines) - 3:,} more)" if lines[3:] else "")
        raise CheckpointError(f"the adapter {adapter_path} cannot be used: {shown}") from error
    model.eval()
    mx.eval(model.parameters())
    _require_finite(model, adapter_path / WEIGHTS)
    return weights_bytes(model) - before


def _require_finite(model: nn.Module, weights_file: Path) -> None:
    """Refuse an adapter with a NaN or an infinity: every answer would be one."""
    parameters = dict(tree_flatten(model.parameters()))
    names: Any = mx.load(str(weights_file))  # not evaluated
    for name in parameters.keys() & names.keys():
        if not mx.isfinite(parameters[name]).all().item():
            raise CheckpointError(
                f"{weights_file}: {name} holds numbers that are not finite; train it again"
            )


def _require_own_format(config: Path) -> None:
    """mlx-lm 0.32.2 takes a PEFT adapter for its own, and fails for want of ``num_layers``."""
    found = json.loads(config.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{config.name} is no JSON object")
    if "peft_type" in found:
        raise ValueError(
            "it is PEFT's; make it mlx-lm's: uma lora import MODEL --adapter-path FOLDER -o NEW"
        )


def open_tokenizer(folder: Path, config: dict[str, Any], trust_remote_code: bool = False) -> Any:
    """The tokenizer of the folder, in mlx-lm's wrapper.

    Raises:
        CheckpointError: If it cannot be read.
    """
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
        if "trust_remote_code" in str(error):
            raise UnsupportedModel(
                f"the tokenizer in {folder} needs its own Python code; it is not run"
            ) from error
        if not (folder / "tokenizer.json").is_file():
            raise CheckpointError(
                f"{folder} has no tokenizer.json: download all files of the model, not its weights "
                "alone"
            ) from error
        raise CheckpointError(f"the tokenizer in {folder} cannot be read: {error}") from error
