"""GGUF blocks against the gguf package's dequantization, through MLX's own."""

from pathlib import Path

import gguf
import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from uma.checkpoint.gguf import GGUFHeader, GGUFTensor, read_header  # noqa: E402
from uma.quantization import Quantization  # noqa: E402
from uma.runtime.gguf import tensors  # noqa: E402
from uma.runtime.gguf.names import Target  # noqa: E402
from uma.runtime.gguf.weights import mapped_rows, model_dtype, plan, quantization_config  # noqa: E402

EXACT = ["Q4_0", "Q4_1", "Q8_0"]
WIDTHS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}


def blocks(kind: str, rows: int = 7, columns: int = 96) -> np.ndarray:
    """Random blocks: every byte of the quants occurs, and scales of every size and sign."""
    random = np.random.default_rng(3)
    count = rows * columns // 32
    scales = random.normal(size=(count, 1)) * 10.0 ** random.uniform(-8, 1, (count, 1))
    scales = scales.astype(np.float16)
    parts = [scales.view(np.uint8)]
    if kind == "Q4_1":
        parts.append(random.normal(size=(count, 1)).astype(np.float16).view(np.uint8))
    width = 32 if kind == "Q8_0" else 16
    parts.append(random.integers(0, 256, (count, width), dtype=np.uint8))
    return np.concatenate(parts, axis=1).reshape(rows, -1)


def dequantized(kind: str, rows: np.ndarray) -> np.ndarray:
    return gguf.dequantize(rows, gguf.GGMLQuantizationType[kind])


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_an_affine_group_of_32_has_the_same_values_bit_for_bit(kind: str, dtype: str) -> None:
    rows = blocks(kind)
    size = rows.shape[1] // 3
    packed, scales, biases = tensors.exact_blocks(rows.reshape(7, 3, size), kind, dtype)
    assert scales.dtype == biases.dtype == dtype
    weight = mx.array(packed.reshape(7, -1))
    values = mx.dequantize(
        weight,
        mx.array(scales).astype(mx.float32),
        mx.array(biases).astype(mx.float32),
        group_size=32,
        bits=WIDTHS[kind],
    )
    np.testing.assert_array_equal(np.array(values), dequantized(kind, rows))


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_a_scale_whose_bias_overflows_float16_is_not_rounded_but_refused(kind: str) -> None:
    size = {"Q4_0": 18, "Q8_0": 34}[kind]
    block = np.zeros((1, 1, size), dtype=np.uint8)
    block[..., :2] = np.array([9000.0], dtype=np.float16).view(np.uint8)
    with pytest.raises(tensors.InexactBias):
        tensors.exact_blocks(block, kind)
    _, scales, biases = tensors.exact_blocks(block, kind, "float32")
    assert (scales.item(), biases.item()) == (9000.0, 9000.0 * {"Q4_0": -8, "Q8_0": -128}[kind])


def conversion(kind: str, shape: tuple[int, ...], form: str, **fields) -> tensors.Conversion:
    source = GGUFTensor("blk.0.attn_q.weight", shape[::-1], kind, 0, 0)
    target = Target("model.layers.0.self_attn.q_proj.weight", fields.pop("change", "none"))
    return tensors.Conversion(source, target, form, fields.pop("dtype", "float32"), **fields)


def test_rows_of_heads_return_to_their_places_in_every_form(monkeypatch) -> None:
    """llama.cpp b11434, conversion/llama.py, ``permute``: reshape, swap, reshape."""
    heads, columns = 4, 64
    values = np.random.default_rng(0).normal(size=(32, columns)).astype(np.float32)
    stored = values.reshape(heads, 2, 4, columns).swapaxes(1, 2).reshape(32, columns)
    kind = gguf.GGMLQuantizationType.Q8_0
    monkeypatch.setattr(tensors, "CHUNK_ELEMENTS", 5 * columns)
    plain = conversion("F32", (32, columns), "float", change="query rows")
    parts = [
        a.view(np.float32) for (a,) in tensors.converted_chunks(plain, stored.view("u1"), heads)
    ]
    np.testing.assert_array_equal(np.concatenate(parts), values)
    exact = conversion(
        "Q8_0", (32, columns), "exact", change="query rows", quantization=Quantization(8, 32)
    )
    chunks = list(tensors.converted_chunks(exact, gguf.quantize(stored, kind), heads))
    assert len(chunks) == 7
    packed, scales, biases = (np.concatenate(part) for part in zip(*chunks, strict=True))
    found = mx.dequantize(
        mx.array(packed.reshape(32, -1)), mx.array(scales), mx.array(biases), group_size=32, bits=8
    )
    np.testing.assert_array_equal(
        np.array(found), gguf.dequantize(gguf.quantize(values, kind), kind)
    )


OTHER_TYPES = sorted(
    kind.name
    for kind in gguf.GGMLQuantizationType
    if kind in gguf.quants._type_traits and kind.name not in (*EXACT, "F32")
)


@pytest.mark.parametrize("kind", OTHER_TYPES)
def test_every_other_type_is_dequantized_by_the_gguf_package_then_quantized(kind: str) -> None:
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    columns = max(block, 64) * 2
    raw = np.random.default_rng(1).integers(0, 60, (3, columns // block * size), dtype=np.uint8)
    expected = dequantized(kind, raw)
    asked = conversion(kind, (3, columns), "quantized", quantization=Quantization(4, 64))
    ((weight, scales, biases),) = tensors.converted_chunks(asked, raw, 1)
    reference = mx.quantize(mx.array(expected), 64, 4)
    for found, wanted in zip((weight, scales, biases), reference, strict=True):
        np.testing.assert_array_equal(found, np.array(wanted.view(mx.uint32)))


def test_bfloat16_values_are_rounded_as_mlx_rounds() -> None:
    values = np.random.default_rng(2).normal(size=(3, 64)).astype(np.float32)
    ((stored,),) = tensors.converted_chunks(
        conversion("F32", (3, 64), "float", dtype="bfloat16"), values.view("u1"), 1
    )
    expected = mx.array(values).astype(mx.bfloat16).astype(mx.float32)
    found = mx.array(stored).view(mx.bfloat16).astype(mx.float32)
    assert stored.dtype == np.uint16
    np.testing.assert_array_equal(np.array(found), np.array(expected))


def test_the_pieces_of_a_tensor_are_what_its_chunks_fill() -> None:
    for item in [
        conversion("Q4_1", (7, 96), "exact", quantization=Quantization(4, 32), dtype="float16"),
        conversion(
            "Q6_K", (7, 512), "quantized", quantization=Quantization(6, 64), dtype="bfloat16"
        ),
        conversion("F16", (7, 96), "float", dtype="float16"),
        conversion("F16", (7, 96), "quantized", quantization=Quantization(4, 32, "mxfp4")),
        conversion("F16", (7, 96), "quantized", quantization=Quantization(4, 16, "nvfp4")),
        conversion("F16", (7, 96), "quantized", quantization=Quantization(8, 32, "mxfp8")),
    ]:
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[item.source.type]]
        columns = item.source.shape[-1]
        raw = np.zeros((7, columns // block * size), dtype=np.uint8)
        (arrays,) = tensors.converted_chunks(item, raw, 1)
        assert [a.nbytes for a in arrays] == [p.size_bytes for p in item.pieces()]


NAMES_OF_MATRICES = ["token_embd", "output"] + [
    f"blk.0.{part}"
    for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
]


def small_file(path: Path, kinds: dict[str, str], columns: int = 64) -> None:
    """A file with the tensors of one qwen2 layer, all of them ``columns`` square."""
    writer = gguf.GGUFWriter(path, "qwen2")
    names = [*NAMES_OF_MATRICES, "output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"]
    for name in names:
        vector = name.endswith("norm")
        values = np.ones(columns if vector else (columns, columns), dtype=np.float32)
        kind = gguf.GGMLQuantizationType["F32" if vector else kinds.get(name, "Q4_0")]
        writer.add_tensor(f"{name}.weight", gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def forms(path: Path, asked: Quantization | None) -> dict[str, tuple[str, int | None]]:
    planned = plan(read_header(path), "qwen2", 1, "float16", asked)
    return {
        c.module: (c.form, c.quantization and c.quantization.bits)
        for c in planned
        if not c.module.endswith("norm")
    }


def test_exact_formats_are_kept_unless_fewer_bits_are_asked(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    small_file(path, {"output": "Q8_0", "blk.0.ffn_up": "F16", "blk.0.ffn_down": "Q5_0"})
    head, up, down = "lm_head", "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
    kept = forms(path, None)
    assert (kept[head], kept[up]) == (("exact", 8), ("float", None))
    assert kept[down] == ("quantized", 4)
    six = forms(path, Quantization(6, 64))
    assert (six[head], six[up], six[down]) == (("quantized", 6),) * 3
    assert six["model.embed_tokens"] == ("exact", 4)
    sixteen = forms(path, Quantization(16, 64))
    assert (sixteen[head], sixteen[up], sixteen[down]) == (("float", None),) * 3


def test_a_width_that_the_group_does_not_divide_gets_groups_of_32_or_none(tmp_path: Path) -> None:
    for columns, expected in ((96, ("quantized", 4)), (80, ("float", None))):
        path = tmp_path / f"{columns}.gguf"
        small_file(path, dict.fromkeys(NAMES_OF_MATRICES, "F16"), columns)
        assert forms(path, Quantization(4, 64))["lm_head"] == expected


def test_modules_of_another_format_than_the_commonest_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    small_file(path, {"output": "Q8_0"})
    config = quantization_config(plan(read_header(path), "qwen2", 1, "float16", None))
    assert config == {
        "group_size": 32,
        "bits": 4,
        "mode": "affine",
        "lm_head": {"group_size": 32, "bits": 8, "mode": "affine"},
    }


def test_mapped_rows_are_the_bytes_of_the_tensor(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    small_file(path, {"output": "Q8_0"})
    header, reader = read_header(path), gguf.GGUFReader(path)
    for tensor, other in zip(header.tensors, reader.tensors, strict=True):
        np.testing.assert_array_equal(
            mapped_rows(header, tensor).ravel(), other.data.view("u1").ravel()
        )


@pytest.mark.parametrize(
    ("model_type", "kinds", "expected"),
    [
        ("qwen2", ["Q4_0"], "float16"),
        ("qwen2", ["Q4_K", "Q8_0"], "float16"),
        ("gemma3_text", ["Q8_0"], "float32"),
        ("qwen2", ["Q4_K", "Q6_K"], "bfloat16"),
        ("qwen2", ["F16"], "float16"),
        ("gemma2", ["F16"], "bfloat16"),
        ("gemma2", ["F32"], "float32"),
        ("qwen2", ["BF16"], "bfloat16"),
        ("qwen2", ["BF16", "F16"], "bfloat16"),
        ("qwen2", ["BF16", "F32"], "float32"),
    ],
)
def test_the_dtype_keeps_what_is_exact_and_holds_gemmas_activations(
    model_type: str, kinds: list[str], expected: str
) -> None:
    stored = [GGUFTensor(f"blk.{i}.attn_q.weight", (256, 2), k, 0, 0) for i, k in enumerate(kinds)]
    others = [
        GGUFTensor("output_norm.weight", (256,), "F32", 0, 0),
        GGUFTensor("blk.0.ffn_gate_inp.weight", (256, 8), "F32", 0, 0),
    ]
    header = GGUFHeader("m.gguf", 3, {}, (*stored, *others), 32, 0)
    assert model_dtype(header, model_type) == expected
