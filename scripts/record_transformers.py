"""What transformers and bitsandbytes really hold, for small models: tests/data/transformers.csv.

Run in an environment of its own; neither the project nor its tests need torch::

    pip install torch==2.13.0 transformers==5.24.0 accelerate bitsandbytes==0.50.2 \
        compressed-tensors==0.20.1 && pip install --no-deps autoawq==0.2.7.post3
    python scripts/record_transformers.py > tests/data/transformers.csv

Rows of kind ``matrix`` are bytes of one linear layer, of ``weights`` those of all parameters and
their quantization states. ``cache`` rows are bytes of the storages behind the cache's tensors
after a prompt and after tokens one by one. ``peak`` rows are the most bytes of tensors alive at
once in one call, weights apart, caches included; memory inside a kernel is not seen.
"""

import csv
import json
import sys
import tempfile
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, FineGrainedFP8Config
from transformers.cache_utils import DynamicCache, StaticCache
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear
from transformers.quantizers.base import get_keys_to_not_convert

CONFIGS = Path(__file__).parent.parent / "tests" / "data" / "transformers_models.json"
BITSANDBYTES = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4-double": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    },
    "int8": {"load_in_8bit": True},
}
COMPRESSED = {
    "compressed-tensors-w4a16": ("W4A16", "pack-quantized"),
    "compressed-tensors-w8a8": ("W8A8", "int-quantized"),
    "compressed-tensors-fp8": ("FP8_DYNAMIC", "float-quantized"),
    "compressed-tensors-nvfp4": ("NVFP4", "nvfp4-pack-quantized"),
    "mxfp4": ("MXFP4", "mxfp4-pack-quantized"),
}
MATRIX = (384, 256)
SLOTS = 80
CALLS = [(1, 0), (40, 0), (40, 1), (40, 4), (64, 4)]
PEAKS = [("sdpa", 64, 1), ("sdpa", 128, 2), ("eager", 96, 1)]

# On the CPU: sinks and heads of two widths have no fused attention, recurrences no kernels.
UNFUSED = ("gpt_oss", "deepseek_v3")
REFERENCE = ("qwen3_next", "falcon_h1")

Row = tuple[str, str, str, int, int, int, int]


class Live(TorchDispatchMode):
    """Bytes of the storages that operations made and that are still alive, and the most so far."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.known = {t.untyped_storage()._cdata for t in tensors(model)}
        self.bytes = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf.untyped_storage())
        return out

    def add(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known.add(key)
            self.bytes += size
            self.peak = max(self.peak, self.bytes)
            weakref.finalize(storage, self.drop, key, size)

    def drop(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.bytes -= size


def tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def total(found: Any) -> int:
    return sum(tensor.nbytes for tensor in found)


def states(parameter: Any) -> Iterator[torch.Tensor]:
    """What bitsandbytes keeps beside a parameter."""
    if getattr(parameter, "SCB", None) is not None:
        yield parameter.SCB
    state = getattr(parameter, "quant_state", None)
    if state is not None:
        yield from (state.absmax, state.code)
        if state.nested:
            yield from (state.offset, state.state2.absmax, state.state2.code)


def built(config: Any, attention: str | None = None, dtype: Any = torch.bfloat16) -> Any:
    return AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation=attention
    ).eval()


def weights_rows(name: str, config: Any) -> Iterator[Row]:
    for scheme, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        with torch.device("meta"):
            model = built(config, dtype=dtype)
        yield row("weights", name, scheme, total(model.parameters()))
    if name != "gpt_oss":  # FP8Experts have no biases
        replace_with_fp8_linear(
            model, get_keys_to_not_convert(model), quantization_config=FineGrainedFP8Config()
        )
        # On the meta device the biases are float32; loading a checkpoint makes them 16 bits.
        biases = [p for n, p in model.named_parameters() if n.endswith(".bias")]
        size = total(model.parameters()) - total(p for p in biases if p.itemsize == 4) // 2
        yield row("weights", name, "fp8", size)
    with tempfile.TemporaryDirectory() as folder:
        built(config).save_pretrained(folder)
        for scheme, options in BITSANDBYTES.items():
            model = AutoModelForCausalLM.from_pretrained(
                folder,
                quantization_config=BitsAndBytesConfig(**options),
                device_map="cpu",
                dtype=torch.bfloat16,
            )
            size = total(model.parameters())
            size += total(t for p in model.parameters() for t in states(p))
            yield row("weights", name, scheme, size)


def matrix_rows() -> Iterator[Row]:
    from compressed_tensors.compressors import compress_module
    from compressed_tensors.quantization import (
        QuantizationConfig,
        apply_quantization_config,
        preset_name_to_scheme,
    )

    for scheme, (preset, layout) in COMPRESSED.items():
        model = torch.nn.Sequential(torch.nn.Linear(MATRIX[1], MATRIX[0], bias=False)).bfloat16()
        groups = {"all": preset_name_to_scheme(preset, ["Linear"])}
        apply_quantization_config(model, QuantizationConfig(config_groups=groups))
        model[0].quantization_scheme.format = layout
        compress_module(model[0])
        yield row("matrix", "linear", scheme, total(model[0].state_dict().values()))
    datasets = types.ModuleType("datasets")  # AutoAWQ imports it for calibration only
    datasets.load_dataset = None  # type: ignore[attr-defined]
    sys.modules.setdefault("datasets", datasets)
    from awq.modules.linear.gemm import WQLinear_GEMM

    linear = WQLinear_GEMM(4, 128, MATRIX[1], MATRIX[0], False, "cpu")
    yield row("matrix", "linear", "awq", total(linear.buffers()))


def cached(cache: Any) -> int:
    """Bytes of the storages behind all tensors of a cache."""
    storages = {}
    for layer in cache.layers:
        for value in vars(layer).values():
            for tensor in tree_leaves(value):
                if isinstance(tensor, torch.Tensor) and tensor.ndim > 1:
                    storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def cache_rows(name: str, config: Any) -> Iterator[Row]:
    model = built(config, "eager")
    for kind in ("dynamic", "static"):
        for prompt, generated in CALLS:
            cache = (
                DynamicCache(config=config)
                if kind == "dynamic"
                else StaticCache(config=config, max_cache_len=SLOTS)
            )
            with torch.no_grad():
                model(torch.zeros(2, prompt, dtype=torch.long), cache=cache, use_cache=True)
                for _ in range(generated):
                    model(torch.zeros(2, 1, dtype=torch.long), cache=cache, use_cache=True)
            yield row("cache", name, kind, cached(cache), prompt, generated, 2)


def peak_rows(name: str, config: Any) -> Iterator[Row]:
    if name in REFERENCE:
        return
    for attention, prompt, batch in PEAKS:
        if attention == "sdpa" and name in UNFUSED:
            continue
        model = built(config, attention)
        for generated in (0, 1):
            cache = DynamicCache(config=config)
            with torch.no_grad(), Live(model) as live:
                for length in [prompt] + [1] * generated:
                    live.peak = live.bytes
                    ids = torch.zeros(batch, length, dtype=torch.long)
                    out = model(ids, cache=cache, use_cache=True, logits_to_keep=1)
                    del out, ids
            yield row("peak", name, attention, live.peak, prompt, generated, batch)


def row(
    kind: str, model: str, what: str, size: int, prompt: int = 0, generated: int = 0, batch: int = 1
) -> Row:
    return kind, model, what, prompt, generated, batch, size


def main() -> None:
    torch.manual_seed(0)
    out = csv.writer(sys.stdout, lineterminator="\n")
    print("# made by scripts/record_transformers.py: torch", torch.__version__)
    out.writerow(("kind", "model", "what", "prompt", "generated", "batch", "bytes"))
    out.writerows(matrix_rows())
    for name, values in json.loads(CONFIGS.read_text()).items():
        config = AutoConfig.for_model(**values)
        for rows in (weights_rows, cache_rows, peak_rows):
            out.writerows(rows(name, config))


if __name__ == "__main__":
    main()
