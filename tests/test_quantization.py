"""Bytes of quantized matrices, against MLX and the gguf package."""

from math import prod

import pytest

from uma.errors import UnsupportedModel, UsageError
from uma.quantization import (
    GGUF_TYPES,
    MODES,
    Quantization,
    quantization_for,
    quantization_of_config,
)

FORMATS = [
    Quantization(bits, group_size, mode)
    for mode, (_, widths, groups) in MODES.items()
    for bits in widths
    for group_size in groups
]


@pytest.mark.parametrize("quantization", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bytes_of_a_matrix_are_those_that_mlx_quantizes_to(
    quantization: Quantization, dtype: str
) -> None:
    mx = pytest.importorskip("mlx.core")
    shape = (3, 8, 384)
    q = quantization
    arrays = mx.quantize(mx.zeros(shape, getattr(mx, dtype)), q.group_size, q.bits, mode=q.mode)
    dtype_bytes = {"bfloat16": 2, "float32": 4}[dtype]
    assert q.matrix_bytes(shape, dtype_bytes) == sum(a.nbytes for a in arrays)


@pytest.mark.parametrize("mode", MODES)
def test_defaults_of_a_mode_are_mlxs(mode: str) -> None:
    quantized = pytest.importorskip("mlx.nn.layers.quantized")
    group_size, bits = quantized._defaults_for_mode(mode, None, None)
    assert quantization_for(mode=mode) == Quantization(bits, group_size, mode)


@pytest.mark.parametrize("bits", [7, 9])
def test_mlx_refuses_the_widths_that_we_refuse(bits: int) -> None:
    mx = pytest.importorskip("mlx.core")
    with pytest.raises(UsageError, match="2, 3, 4, 5, 6, 8"):
        quantization_for(bits=bits)
    with pytest.raises(ValueError, match="number of bits"):
        mx.quantize(mx.zeros((4, 64)), 64, bits)


def test_a_matrix_that_is_not_whole_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="groups of 64"):
        Quantization(4, 64).matrix_bytes((8, 96))


def test_sixteen_bits_are_full_precision() -> None:
    assert quantization_for(bits=16) is None


@pytest.mark.parametrize(
    ("bits", "mode", "group_size", "message"),
    [
        (4, "int4", None, "affine, mxfp4, mxfp8, nvfp4"),
        (8, "mxfp4", None, "allowed are 4"),
        (4, "nvfp4", 32, "allowed are 16"),
        (4, None, 16, "allowed are 32, 64, 128"),
        (16, "affine", None, "allowed are 2, 3, 4, 5, 6, 8"),
        (0, None, None, "allowed are"),
    ],
)
def test_impossible_formats_are_refused_with_the_possible_ones(
    bits: int, mode: str | None, group_size: int | None, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        quantization_for(bits, mode, group_size)


def test_gguf_blocks_are_those_of_the_gguf_package() -> None:
    constants = pytest.importorskip("gguf.constants")
    theirs = {kind.name: tuple(sizes) for kind, sizes in constants.GGML_QUANT_SIZES.items()}
    assert theirs == GGUF_TYPES


def test_a_config_of_mlx_names_its_exceptions() -> None:
    stored = quantization_of_config(
        {
            "quantization": {
                "bits": 4,
                "group_size": 64,
                "model.layers.0.mlp.gate": {"bits": 8, "group_size": 64},
                "lm_head": False,
            }
        }
    )
    assert stored is not None
    assert stored.of("model.layers.0.mlp.gate") == Quantization(8, 64)
    assert stored.of("model.layers.1.mlp.gate") == Quantization(4, 64)
    assert stored.of("lm_head") is None


def test_only_the_experts_of_a_gpt_oss_checkpoint_are_quantized() -> None:
    stored = quantization_of_config({"quantization_config": {"quant_method": "mxfp4"}})
    assert stored is not None
    assert stored.of("model.layers.3.mlp.experts.up_proj") == Quantization(4, 32, "mxfp4")
    assert stored.of("model.layers.3.self_attn.q_proj") is None


def test_fp8_checkpoints_are_held_in_full_precision() -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert quantization_of_config({"quantization_config": fp8}) is None
    assert quantization_of_config({}) is None


def test_modules_that_another_tool_leaves_alone_are_not_quantized() -> None:
    stored = quantization_of_config(
        {
            "quantization_config": {
                "quant_method": "modelopt",
                "quant_algo": "NVFP4",
                "ignore": ["lm_head", "model.layers.0.self_attn*"],
            }
        }
    )
    assert stored is not None
    assert stored.of("lm_head") is None
    assert stored.of("model.layers.0.self_attn.q_proj") is None
    assert stored.of("model.layers.1.self_attn.q_proj") == Quantization(4, 16, "nvfp4")


def test_a_format_that_mlx_lm_cannot_load_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="bitsandbytes"):
        quantization_of_config({"quantization_config": {"quant_method": "bitsandbytes"}})


def test_bits_per_weight_of_affine_4_64_are_four_and_a_half() -> None:
    shape = (128, 512)
    assert Quantization(4, 64).matrix_bytes(shape) * 8 / prod(shape) == 4.5


def test_modules_that_a_regular_expression_names_stay_in_full_precision() -> None:
    """compressed-tensors writes them with ``re:``, for the names of the published model."""
    stored = quantization_of_config(
        {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "ignore": [
                    "lm_head",
                    "re:.*self_attn.*",
                    "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
                ],
            }
        }
    )
    assert stored is not None
    kept = ("lm_head", "model.layers.3.self_attn.o_proj", "model.layers.0.mlp.down_proj")
    assert [stored.of(name) for name in (*kept, "model.embed_tokens")] == [None] * 4
    experts = stored.of("model.layers.3.mlp.switch_mlp.down_proj")
    assert experts is not None
    assert experts.bits == 4
