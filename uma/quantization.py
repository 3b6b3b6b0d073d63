"""Number formats of weights, and the bytes of a matrix stored in each."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import field
from fnmatch import fnmatch
from math import prod
from typing import Any

from uma.errors import CheckpointError, UnsupportedModel, UsageError
from uma.frozen import dataclass

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1}
FLOAT32 = DTYPE_BYTES["float32"]

# Per mode: the default (group_size, bits), then every width and group size that it allows.
# mlx 0.32.4, nn/layers/quantized.py, _defaults_for_mode; mlx/ops.cpp, affine_quantize, fp_quantize.
MODES: dict[str, tuple[tuple[int, int], tuple[int, ...], tuple[int, ...]]] = {
    "affine": ((64, 4), (2, 3, 4, 5, 6, 8), (32, 64, 128)),
    "mxfp4": ((32, 4), (4,), (32,)),
    "mxfp8": ((32, 8), (8,), (32,)),
    "nvfp4": ((16, 4), (4,), (16,)),
}


@dataclass(frozen=True, slots=True)
class Quantization:
    """An MLX format: ``affine`` keeps a scale and a bias per group, the others a scale byte.

    Defaults of (group_size, bits) by mode are MLX's: affine 64/4, mxfp4 32/4, nvfp4 16/4,
    mxfp8 32/8 (mlx 0.32.4, ``nn/layers/quantized.py``, ``_defaults_for_mode``).
    """

    bits: int = 4
    group_size: int = 64
    mode: str = "affine"

    def __str__(self) -> str:
        return f"{self.mode} {self.bits}/{self.group_size}"

    def to_config(self) -> dict[str, Any]:
        """What ``quantization`` of ``config.json`` says, and what MLX's functions take."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}

    def matrix_bytes(self, shape: tuple[int, ...], dtype_bytes: int = 2) -> int:
        """Bytes of an array of ``shape`` quantized along its last axis.

        Scales and biases of ``affine`` are in the model's dtype. The nvfp4 of ``mlx_lm.convert``
        has no tensor scale (mlx 0.32.4, ``mlx/ops.cpp``, ``fp_quantize``: it is optional).

        Raises:
            ValueError: If the last dimension is not whole groups.
        """
        size = prod(shape)
        if not shape or shape[-1] % self.group_size:
            raise ValueError(f"{shape} does not split into groups of {self.group_size}")
        group_bytes = 2 * dtype_bytes if self.mode == "affine" else 1
        return size * self.bits // 8 + size // self.group_size * group_bytes


def quantization_for(
    bits: int | None = None, mode: str | None = None, group_size: int | None = None
) -> Quantization | None:
    """The format that ``--bits``, ``--mode`` and ``--group-size`` name; ``None`` for 16 bits.

    Raises:
        UsageError: If MLX has no such format.

    >>> str(quantization_for(bits=4)), str(quantization_for(mode="nvfp4")), quantization_for(16)
    ('affine 4/64', 'nvfp4 4/16', None)
    """
    if bits == 16 and mode is None and group_size is None:
        return None
    chosen = mode or "affine"
    if chosen not in MODES:
        raise UsageError(f"--mode {chosen!r} is not one of {', '.join(MODES)}")
    (default_group, default_bits), widths, groups = MODES[chosen]
    chosen_bits = default_bits if bits is None else bits
    chosen_group = default_group if group_size is None else group_size
    if chosen_bits not in widths:
        more = ", or 16 for full precision without --mode and --group-size"
        raise UsageError(f"--bits {chosen_bits} with {chosen}: allowed are {_listed(widths)}{more}")
    if chosen_group not in groups:
        raise UsageError(
            f"--group-size {chosen_group} with {chosen}: allowed are {_listed(groups)}"
        )
    return Quantization(chosen_bits, chosen_group, chosen)


def _listed(values: Iterable[int]) -> str:
    return ", ".join(str(value) for value in values)


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """What a ``config.json`` says of its weights: one format, and exceptions by module name.

    A value of ``None`` in ``overrides`` keeps that module in full precision; ``skipped`` are
    patterns of modules that are kept so, ``only`` (if not empty) of those that are not.
    """

    default: Quantization
    overrides: Mapping[str, Quantization | None] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    only: tuple[str, ...] = ()

    def of(self, name: str) -> Quantization | None:
        """The format of the module ``name``, a path without ``.weight``."""
        if name in self.overrides:
            return self.overrides[name]
        if any(_matches(name, pattern) for pattern in self.skipped):
            return None
        if self.only and not any(fnmatch(name, pattern) for pattern in self.only):
            return None
        return self.default


def _matches(name: str, pattern: str) -> bool:
    """Whether a module is meant by a pattern, or by a regular expression that begins with ``re:``.

    compressed-tensors matches the latter against the names of the published model, in which each
    expert is a module.
    """
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name.replace("switch_mlp.", "experts.0.")) is not None
    return fnmatch(name, pattern)


def quantization_of_config(config: Mapping[str, Any]) -> StoredQuantization | None:
    """The formats that the weights of ``config`` are stored in; ``None`` if not quantized.

    Follows ``load_model`` of mlx-lm 0.32.2 (``utils.py``): MLX's own ``quantization``, else a
    ``quantization_config`` of another tool. FP8 checkpoints are dequantized on load, unless they
    have power-of-two scales over 32 x 32 blocks, which are mxfp8. What the file headers hold wins
    over this wherever they can be read.

    Raises:
        UnsupportedModel: If mlx-lm cannot load the format.
        CheckpointError: If MLX has none of those bits.
    """
    stored = config.get("quantization")
    if isinstance(stored, Mapping):
        return _mlx_quantization(stored)
    if stored is not None:
        raise CheckpointError(f"config.json has quantization {stored!r}, which is no format")
    nested = config.get("text_config")
    foreign = config.get("quantization_config")
    if foreign is None and isinstance(nested, Mapping):
        foreign = nested.get("quantization_config")
    return _foreign_quantization(foreign) if isinstance(foreign, Mapping) else None


def _mlx_quantization(stored: Mapping[str, Any]) -> StoredQuantization:
    default = _quantization(stored)
    overrides = {
        name: _quantization(value) if isinstance(value, Mapping) else (default if value else None)
        for name, value in stored.items()
        if isinstance(value, (Mapping, bool))
    }
    return StoredQuantization(default, overrides)


def _quantization(values: Mapping[str, Any]) -> Quantization:
    mode = values.get("mode", "affine")
    (group_size, bits), widths, _ = MODES.get(mode, MODES["affine"])
    found = Quantization(values.get("bits", bits), values.get("group_size", group_size), mode)
    if mode not in MODES or found.bits not in widths or type(found.group_size) is not int:
        raise CheckpointError(f"config.json has quantization {found}, which MLX does not have")
    if found.group_size < 1:
        raise CheckpointError(f"config.json has quantization {found}, whose groups are empty")
    return found


def _foreign_quantization(foreign: Mapping[str, Any]) -> StoredQuantization | None:
    if "quant_method" not in foreign and {"bits", "group_size"} <= foreign.keys():
        return _mlx_quantization(foreign)
    method = foreign.get("quant_method")
    settings = foreign.get("quantization", foreign)
    skipped = _skipped(settings)
    if method == "mxfp4":
        return StoredQuantization(Quantization(4, 32, "mxfp4"), only=("*.experts.*",))
    if method == "mxfp8":
        return StoredQuantization(Quantization(8, 32, "mxfp8"), skipped=skipped)
    if method == "fp8":
        blocks = list(foreign.get("weight_block_size") or ())
        if foreign.get("scale_fmt") == "ue8m0" and blocks == [32, 32]:
            return StoredQuantization(Quantization(8, 32, "mxfp8"), skipped=skipped)
        return None
    if method == "modelopt" and settings.get("quant_algo") == "NVFP4":
        group_size = settings.get("group_size", 16)
        return StoredQuantization(Quantization(4, group_size, "nvfp4"), skipped=skipped)
    if method == "compressed-tensors" and foreign.get("format") in PACKED:
        return StoredQuantization(PACKED[foreign["format"]], skipped=(*skipped, "*embed_tokens"))
    if method in ("awq", "gptq") and foreign.get("bits", 4) == 4:
        group_size = foreign.get("group_size", 128)
        return StoredQuantization(
            Quantization(4, group_size), skipped=("*embed_tokens", "*lm_head")
        )
    raise UnsupportedModel(
        f"weights quantized by {method!r} ({foreign.get('format') or settings.get('quant_algo')}) "
        "cannot be loaded; use a repository in MLX's own formats or in 16 bits"
    )


# mlx-lm 0.32.2, utils.py, _compressed_tensors_quantization.
PACKED = {
    "nvfp4-pack-quantized": Quantization(4, 16, "nvfp4"),
    "mxfp4-pack-quantized": Quantization(4, 32, "mxfp4"),
    "pack-quantized": Quantization(4, 32, "affine"),
}


def _skipped(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Modules left alone, which each tool lists under another key, as patterns."""
    keys = ("ignore", "exclude_modules", "modules_to_not_convert")
    names = next((settings[key] for key in keys if settings.get(key)), ())
    return tuple(
        pattern
        for name in names
        for pattern in ([name] if name.startswith("re:") else [f"*{name}", f"*{name}.*"])
    )


# Elements and bytes of one block of each type in a GGUF file: the structs of ggml-common.h
# (llama.cpp b9000), as gguf 0.19.0 lists them in constants.py, GGML_QUANT_SIZES.
GGUF_TYPES: dict[str, tuple[int, int]] = {
    "F64": (1, 8),
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "I8": (1, 1),
    "I16": (1, 2),
    "I32": (1, 4),
    "I64": (1, 8),
    "Q1_0": (128, 18),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q8_1": (32, 40),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "Q8_K": (256, 292),
    "IQ1_S": (256, 50),
    "IQ1_M": (256, 56),
    "IQ2_XXS": (256, 66),
    "IQ2_XS": (256, 74),
    "IQ2_S": (256, 82),
    "IQ3_XXS": (256, 98),
    "IQ3_S": (256, 110),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "TQ1_0": (256, 54),
    "TQ2_0": (256, 66),
    "MXFP4": (32, 17),
    "NVFP4": (64, 36),
}


def gguf_bytes(gguf_type: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of ``shape``, rows last, in a type of ``GGUF_TYPES``.

    Raises:
        ValueError: If its rows are not whole blocks.

    >>> gguf_bytes("Q4_K", (4096, 4096))
    9437184
    """
    block, block_bytes = GGUF_TYPES[gguf_type]
    if (shape or (1,))[-1] % block:
        raise ValueError(f"rows of {shape} are not whole blocks of {block} for {gguf_type}")
    return prod(shape) // block * block_bytes
