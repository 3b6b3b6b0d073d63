"""Number formats of weights, and the bytes of a matrix stored in each."""

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Quantization:
    """An MLX format: ``affine`` keeps a scale and a bias per group, the others a scale byte.

    Defaults of (group_size, bits) by mode are MLX's: affine 64/4, mxfp4 32/4, nvfp4 16/4,
    mxfp8 32/8 (mlx 0.32.4, ``nn/layers/quantized.py``, ``_defaults_for_mode``).
    """

    bits: int = 4
    group_size: int = 64
    mode: str = "affine"
