"""mlx-lm's models as their files build them, and their parameters, caches and bytes."""

import contextlib
import copy
import io
import sys
import types
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path, tree_reduce
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import _get_classes, quantize_model

from uma.architecture.layers import Architecture, parameters
from uma.quantization import Quantization

# mlx-lm's olmo probes for a package that it does not use.
sys.modules.setdefault("hf_olmo", types.ModuleType("hf_olmo"))

UNTIED_WITHOUT_HEAD = ("gemma3_text", "gemma3")


def build(config: dict[str, Any]) -> Any:
    """The model of ``config``, nothing evaluated; without the head that a checkpoint lacks."""
    config = copy.deepcopy(config)
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    if config["model_type"] in UNTIED_WITHOUT_HEAD:
        model = _without_head(model)
    return model


def _without_head(model: Any) -> Any:
    text = getattr(model, "language_model", model)
    text.tie_word_embeddings = True
    text.pop("lm_head")
    return model


def shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter by path, a module's own ``weight`` by the module's path."""
    flat = tree_flatten(model.parameters())
    return {name.removesuffix(".weight"): tuple(value.shape) for name, value in flat}


def our_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    return {p.name: p.shape for p in parameters(architecture)}


def cast(model: Any, dtype: mx.Dtype = mx.bfloat16) -> Any:
    """The model in ``dtype`` by the rule of ``mlx_lm.convert``."""
    keeps = getattr(model, "cast_predicate", lambda _: True)

    def as_dtype(name: str, value: mx.array) -> mx.array:
        floating = mx.issubdtype(value.dtype, mx.floating)
        return value.astype(dtype) if floating and keeps(name) else value

    model.update(tree_map_with_path(as_dtype, model.parameters()))
    return model


def converted(config: dict[str, Any], quantization: Quantization | None) -> Any:
    """The model as ``mlx_lm.convert`` would store it, nothing evaluated."""
    model = cast(build(config))
    if quantization is None:
        return model
    with contextlib.redirect_stdout(io.StringIO()):
        model, _ = quantize_model(
            model, config, quantization.group_size, quantization.bits, quantization.mode
        )
    return model


def runnable(config: dict[str, Any]) -> Any:
    """A random model in bfloat16; experts quantized, as MLX's CPU backend gathers no others."""
    model = cast(build(config))
    nn.quantize(model, 32, 8, class_predicate=lambda _, m: isinstance(m, SwitchLinear))
    mx.eval(model.parameters())
    return model


def weight_bytes(model: Any) -> int:
    return int(
        tree_reduce(
            lambda size, x: size + x.nbytes if isinstance(x, mx.array) else size,
            model.parameters(),
            0,
        )
    )


def cache_bytes_of_a_run(
    config: dict[str, Any], prompt_tokens: int, prefill_step_size: int, generated_tokens: int
) -> tuple[int, int, int]:
    """Bytes of a random model's caches: most in prefill, at its end, and after generating."""
    from mlx_lm.generate import generate_step
    from mlx_lm.models.cache import make_prompt_cache

    model = runnable(config)
    caches = make_prompt_cache(model)
    prompt = mx.ones((prompt_tokens,), dtype=mx.int32)
    sizes: list[int] = []
    call = type(model).__call__

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = call(self, *args, **kwargs)
        sizes.append(sum(c.nbytes for c in caches))
        return out

    counted = type("Counted", (type(model),), {"__call__": counting})
    model.__class__ = counted
    steps = generate_step(
        prompt,
        model,
        max_tokens=generated_tokens,
        prompt_cache=caches,
        prefill_step_size=prefill_step_size,
    )
    mx.disable_compile()  # compiling for the CPU takes longer than these models
    list(steps)
    mx.enable_compile()
    prefill = -(-(prompt_tokens - 1) // prefill_step_size) + 1
    return max(sizes[:prefill]), sizes[prefill - 1], sizes[-1]
