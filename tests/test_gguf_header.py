"""The GGUF header reader, against the gguf package and against hostile files."""

import struct
from pathlib import Path

import gguf as reference
import numpy as np
import pytest
from hostile import assert_bounded
from hypothesis import given, settings
from hypothesis import strategies as st

from uma.checkpoint import gguf
from uma.checkpoint.default_model import find_default_model
from uma.checkpoint.gguf import GGUFArray, read_header
from uma.errors import CheckpointError
from uma.paths import cache_folder

U32, ARRAY, STRING = 4, 9, 8


def written(path: Path) -> Path:
    """A small file of every metadata type and several tensor types, by the gguf package."""
    writer = reference.GGUFWriter(path, "llama")
    writer.add_name("tiny \U0001f600 model")
    writer.add_block_count(2)
    for name in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
        getattr(writer, f"add_{name}")(f"x.{name}", 100)
    writer.add_float32("x.float32", 0.1)
    writer.add_float64("x.float64", 0.1)
    writer.add_bool("x.bool", True)
    writer.add_token_list(["<s>", "</s>", "▁hello", "é", ""])
    writer.add_token_scores([0.0, -1.5, 2.25, 3.0, 4.0])
    writer.add_token_types([3, 3, 1, 1, 1])
    writer.add_array("x.bools", [True, False, True])
    writer.add_array("x.empty", [])
    writer.add_tensor("f32", np.ones((3, 5), np.float32))
    writer.add_tensor("f16", np.ones((2, 2, 7), np.float16))
    for kind in ("Q4_0", "Q4_1", "Q8_0"):
        quantization = reference.GGMLQuantizationType[kind]
        rows = reference.quants.quantize(np.ones((4, 64), np.float32), quantization)
        writer.add_tensor(kind.lower(), rows, raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return written(tmp_path_factory.mktemp("gguf") / "small.gguf")


def assert_read_alike(path: Path) -> None:
    """Every value and every tensor, as ``gguf.GGUFReader`` has it."""
    header, reader = read_header(path), reference.GGUFReader(path)
    fields = {k: f for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert header.metadata.keys() == fields.keys()
    for key, field in fields.items():
        value = header.metadata[key]
        assert (value.read() if isinstance(value, GGUFArray) else value) == field.contents()
    assert header.alignment == reader.alignment
    assert header.data_offset == reader.data_offset
    ours = {
        t.name: (list(t.dims), t.type, header.data_offset + t.offset, t.size_bytes)
        for t in header.tensors
    }
    assert ours == {
        t.name: (t.shape.tolist(), t.tensor_type.name, t.data_offset, t.n_bytes)
        for t in reader.tensors
    }


def test_a_file_is_read_as_the_gguf_package_reads_it(small):
    assert_read_alike(small)


def test_the_default_model_is_read_as_the_gguf_package_reads_it():
    path = find_default_model(cache_folder() / "models")
    if path is None:
        pytest.skip("the default model is not on this machine; `uma run` fetches it")
    assert_read_alike(path)


def test_the_tensor_types_are_those_of_the_gguf_package():
    theirs = {int(kind): kind.name for kind in reference.GGMLQuantizationType}
    assert theirs == gguf.TENSOR_TYPES


def test_a_tensors_shape_is_that_of_numpy(small):
    shapes = {t.name: t.shape for t in read_header(small).tensors}
    assert shapes["f32"] == (3, 5)
    assert shapes["f16"] == (2, 2, 7)


def test_an_alignment_of_the_file_is_kept(tmp_path):
    writer = reference.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_custom_alignment(256)
    writer.add_tensor("a", np.ones(3, np.float32))
    writer.add_tensor("b", np.ones(3, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_header(tmp_path / "x.gguf")
    assert header.alignment == 256
    assert [t.offset for t in header.tensors] == [0, 256]
    assert_read_alike(tmp_path / "x.gguf")


def test_an_array_of_another_element_type_is_refused(small):
    header = read_header(small)
    assert header.integers("tokenizer.ggml.token_type") == [3, 3, 1, 1, 1]
    with pytest.raises(CheckpointError, match="must be an array of string, not float32"):
        header.strings("tokenizer.ggml.scores")
    with pytest.raises(CheckpointError, match="must be an array of int or uint, not string"):
        header.integers("tokenizer.ggml.tokens")
    with pytest.raises(CheckpointError, match="must be an array of float, not str"):
        header.floats("general.name")
    with pytest.raises(CheckpointError, match="not NoneType"):
        header.strings("tokenizer.ggml.merges")


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def number(key: str, value: int) -> bytes:
    return text(key) + struct.pack("<II", U32, value)


def array(key: str, kind: int, count: int, data: bytes = b"") -> bytes:
    return text(key) + struct.pack("<IIQ", ARRAY, kind, count) + data


def tensor(name="t", dims=(32,), kind=0, offset=0, n_dims=None) -> bytes:
    n_dims = len(dims) if n_dims is None else n_dims
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", n_dims, *dims, kind, offset)


def build(keys=(), tensors=(), version=3, counts=None, data=1 << 12, magic=b"GGUF") -> bytes:
    n_tensors, n_keys = counts or (len(tensors), len(keys))
    header = magic + struct.pack("<IQQ", version, n_tensors, n_keys)
    return header + b"".join(keys) + b"".join(tensors) + bytes(data)


ALIGN = "general.alignment"
HOSTILE = {
    "an empty file": b"",
    "another magic": build(magic=b"GGML"),
    "version 1": build(version=1),
    "big endian": build(version=3 << 24),
    "2^64 - 1 tensors": build(counts=(2**64 - 1, 0)),
    "2^64 - 1 keys": build(counts=(0, 2**64 - 1)),
    "2^40 tensors": build(counts=(2**40, 0)),
    "more keys than there are": build(keys=[number("a", 1)], counts=(0, 60_000), data=100),
    "a key beyond the file": build(keys=[struct.pack("<Q", 2**63) + b"a"]),
    "a key that wraps": build(keys=[struct.pack("<Q", 2**64 - 1) + b"a"]),
    "a string beyond the file": build(keys=[text("a") + struct.pack("<IQ", STRING, 2**62)]),
    "an unknown type": build(keys=[text("a") + struct.pack("<I", 13) + bytes(8)]),
    "an array beyond the file": build(keys=[array("a", U32, 2**61)]),
    "an array that wraps": build(keys=[array("a", 10, 2**61)]),
    "strings beyond the file": build(keys=[array("a", STRING, 2**60)]),
    "a string of an array beyond the file": build(
        keys=[array("a", STRING, 2, text("x") + struct.pack("<Q", 2**63))]
    ),
    "nested arrays": build(keys=[array("a", ARRAY, 1, struct.pack("<IQ", ARRAY, 1) * 1000)]),
    "an array of an unknown type": build(keys=[array("a", 99, 1)]),
    "a key twice": build(keys=[number("a", 1), number("a", 2)]),
    "a key that is not utf-8": build(keys=[text(b"\xff\xfe") + struct.pack("<II", U32, 1)]),
    "alignment 0": build(keys=[number(ALIGN, 0)], tensors=[tensor()]),
    "alignment 3": build(keys=[number(ALIGN, 3)], tensors=[tensor()]),
    "alignment 2^30": build(keys=[number(ALIGN, 1 << 30)]),
    "an alignment that is text": build(
        keys=[text(ALIGN) + struct.pack("<I", STRING) + text("32")], tensors=[tensor()]
    ),
    "no dims": build(tensors=[tensor(dims=())]),
    "5 dims": build(tensors=[tensor(dims=(1,) * 5)]),
    "2^32 - 1 dims": build(tensors=[tensor(dims=(1,), n_dims=2**32 - 1)]),
    "a dim of 0": build(tensors=[tensor(dims=(32, 0))]),
    "dims that wrap to 0": build(tensors=[tensor(dims=(2**32, 2**32))]),
    "dims that wrap to 32": build(tensors=[tensor(dims=(32, 2**59 + 1, 32))]),
    "a row that is no whole block": build(tensors=[tensor(dims=(33,), kind=2)]),
    "a removed type": build(tensors=[tensor(kind=4)]),
    "an unknown tensor type": build(tensors=[tensor(kind=2**32 - 1)]),
    "an offset outside the data": build(tensors=[tensor(offset=1 << 20)]),
    "an offset that wraps": build(tensors=[tensor(offset=2**64 - 32)]),
    "an offset off the alignment": build(tensors=[tensor(offset=4)]),
    "a tensor longer than the file": build(tensors=[tensor(dims=(1 << 20,))]),
    "overlapping tensors": build(tensors=[tensor("a", (64,)), tensor("b", (64,), offset=32)]),
    "two tensors of a name": build(tensors=[tensor("a"), tensor("a", offset=128)]),
    "a tensor name that is not utf-8": build(tensors=[tensor(name=b"\xff")]),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_malformed_file_is_refused_by_name(tmp_path, case):
    path = tmp_path / "evil.gguf"
    path.write_bytes(HOSTILE[case])
    with pytest.raises(CheckpointError, match=r"evil\.gguf") as error:
        read_header(path)
    assert str(error.value).isprintable()


def test_a_well_formed_file_of_the_same_builder_is_read(tmp_path):
    path = tmp_path / "good.gguf"
    path.write_bytes(build(keys=[number(ALIGN, 64)], tensors=[tensor(), tensor("b", offset=128)]))
    assert [t.name for t in read_header(path).tensors] == ["t", "b"]


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"nope\.gguf: cannot be read"):
        read_header(tmp_path / "nope.gguf")


def test_a_token_that_is_not_utf_8_is_refused_when_it_is_read(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(build(keys=[array("tokens", STRING, 1, text(b"\xff"))]))
    with pytest.raises(CheckpointError, match="tokens"):
        read_header(path).strings("tokens")


def test_a_file_cut_at_any_byte_is_refused(small, tmp_path):
    whole = small.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole)
    with open(path, "r+b") as file:
        # The padding behind the last tensor may go.
        end = read_header(path)
        last = end.tensors[-1]
        for length in range(end.data_offset + last.offset + last.size_bytes - 1, -1, -1):
            file.truncate(length)
            with pytest.raises(CheckpointError):
                read_header(path)


@settings(deadline=None, max_examples=400)
@given(data=st.data())
def test_a_changed_file_is_read_or_refused(small, tmp_path_factory, data):
    raw = bytearray(small.read_bytes())
    header_bytes = read_header(small).data_offset
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, header_bytes))
        cut = data.draw(st.integers(0, 8))
        raw[at : at + cut] = data.draw(st.binary(max_size=8))
    path = tmp_path_factory.mktemp("fuzz") / "changed.gguf"
    path.write_bytes(raw)
    try:
        header = read_header(path)
        for value in header.metadata.values():
            if isinstance(value, GGUFArray):
                assert len(value.read()) == len(value)
    except CheckpointError:
        return
    assert header.data_offset + max(t.offset + t.size_bytes for t in header.tensors) <= len(raw)


BOMBS = {
    "a sparse gigabyte of empty strings": [array("a", STRING, 2**27)],
    "2^21 empty strings": [array("a", STRING, gguf.MAX_STRINGS)],
    "a number array over a sparse gigabyte": [array("a", U32, 2**28)],
    "a string of a sparse gigabyte": [text("a") + struct.pack("<IQ", STRING, 2**30)],
    "2^16 keys": [number(f"k{i}", i) for i in range(gguf.MAX_KEYS)],
    "strings that widen": [
        text(f"k{i}") + struct.pack("<I", STRING) + text(b"\xf0\x9f\x98\x80" + bytes(10**6))
        for i in range(120)
    ],
}


@pytest.mark.parametrize("case", BOMBS)
def test_a_bomb_takes_under_two_seconds_and_300_mb(tmp_path, case):
    path = tmp_path / "bomb.gguf"
    with open(path, "wb") as file:
        file.write(build(keys=BOMBS[case]))
        file.truncate(2 << 30)
    assert_bounded("uma.checkpoint.gguf", path)


def test_one_tensor_more_than_is_read_is_refused(tmp_path):
    path = tmp_path / "many.gguf"
    path.write_bytes(build(counts=(gguf.MAX_TENSORS + 1, 0)))
    with pytest.raises(CheckpointError, match="at most 131,072"):
        read_header(path)


def test_as_many_tensors_as_are_read_take_under_two_seconds_and_300_mb(tmp_path):
    count = gguf.MAX_TENSORS
    path = tmp_path / "bomb.gguf"
    rows = [tensor(f"tensor.{i}", (1, 1, 1, 1), offset=32 * i) for i in range(count)]
    path.write_bytes(build(tensors=rows, data=32 * count + 64))
    assert len(read_header(path).tensors) == count
    assert_bounded("uma.checkpoint.gguf", path)
