"""The safetensors header reader, against the safetensors package and against hostile files."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hostile import assert_bounded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from uma.checkpoint import safetensors
from uma.checkpoint.safetensors import DTYPE_BITS, INDEX, read_header
from uma.errors import CheckpointError

TENSORS = {
    "a.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b.bias": np.zeros(5, dtype=np.float16),
    "c": np.zeros((), dtype=np.int64),
    "empty": np.zeros((0, 4), dtype=np.uint8),
}


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    return path


def write(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(raw) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + raw + data)
    return path


def entry(shape=(2,), offsets=(0, 8), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_a_header_is_read_as_the_safetensors_package_reads_it(small):
    header = read_header(small)
    with safe_open(small, framework="numpy") as file:
        theirs = {
            name: (tuple(s.get_shape()), s.get_dtype())
            for name in file.keys()  # noqa: SIM118
            for s in [file.get_slice(name)]
        }
        assert header.metadata == file.metadata()
    assert {t.name: (t.shape, t.dtype) for t in header.tensors} == theirs
    assert header.size_bytes == sum(array.nbytes for array in TENSORS.values())


def test_the_data_of_a_tensor_lies_where_the_header_says(small):
    header = read_header(small)
    tensor = next(t for t in header.tensors if t.name == "a.weight")
    raw = small.read_bytes()[header.data_offset :][tensor.begin : tensor.end]
    assert np.array_equal(np.frombuffer(raw, np.float32).reshape(2, 3), TENSORS["a.weight"])


def test_the_dtypes_are_those_of_the_safetensors_package(tmp_path):
    path = write(tmp_path / "x.safetensors", {"a": entry(dtype="NOPE")}, bytes(8))
    with pytest.raises(SafetensorError) as error, safe_open(path, framework="numpy"):
        pass
    assert set(re.findall(r"`([A-Z]\w+)`", str(error.value))) - {"NOPE"} == set(DTYPE_BITS)


HOSTILE = {
    "a length of 2^63": (b"{}", b"", 1 << 63),
    "a length beyond the file": (b"{}", b"", 3),
    "no header": (b"", b"", 0),
    "not json": (b"{,}", b"", None),
    "not utf-8": (b'{"\xff":1}', b"", None),
    "an array": ([], b"", None),
    "a cut integer": (b'{"a":1', b"", None),
    "nested arrays": (b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}", b"", None),
    "an integer of 5,000 digits": (b'{"a":' + b"9" * 5000 + b"}", b"", None),
    "a tensor that is a number": ({"a": 1}, b"", None),
    "a missing key": ({"a": {"dtype": "F32", "shape": [2]}}, bytes(8), None),
    "an unknown dtype": ({"a": entry(dtype="F7")}, bytes(8), None),
    "a dtype that is a list": ({"a": entry(dtype=["F32"])}, bytes(8), None),
    "a negative dim": ({"a": entry(shape=(-2,))}, bytes(8), None),
    "a fractional dim": ({"a": entry(shape=(2.0,))}, bytes(8), None),
    "a boolean dim": ({"a": entry(shape=(True, 2))}, bytes(8), None),
    "dims whose product wraps": ({"a": entry(shape=(1 << 62, 4, 2))}, bytes(8), None),
    "a million dims": ({"a": entry(shape=[1 << 62] * 100_000)}, bytes(8), None),
    "a shape that is a string": ({"a": entry() | {"shape": "2"}}, bytes(8), None),
    "three offsets": ({"a": entry(offsets=(0, 8, 8))}, bytes(8), None),
    "offsets backwards": ({"a": entry(offsets=(8, 0))}, bytes(8), None),
    "negative offsets": ({"a": entry(offsets=(-8, 0))}, bytes(8), None),
    "an end beyond the file": ({"a": entry(offsets=(0, 8))}, bytes(7), None),
    "a size that is not the shape's": ({"a": entry(shape=(3,))}, bytes(8), None),
    "an overlap": ({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12), None),
    "a hole": ({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20), None),
    "bytes of no tensor": ({"a": entry()}, bytes(9), None),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, b"", None),
    "metadata that is a list": ({"__metadata__": []}, b"", None),
    "half a surrogate pair": (b'{"\\ud800":' + json.dumps(entry()).encode() + b"}", bytes(8), None),
    "a name twice": (
        b'{"a":%b,"a":%b}' % ((json.dumps(entry()).encode(),) * 2),
        bytes(8),
        None,
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_malformed_file_is_refused_by_name(tmp_path, case):
    header, data, length = HOSTILE[case]
    path = write(tmp_path / "evil.safetensors", header, data, length)
    with pytest.raises(CheckpointError, match=r"evil\.safetensors"):
        read_header(path)


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"nope\.safetensors: cannot be read"):
        read_header(tmp_path / "nope.safetensors")


def test_control_characters_of_a_name_never_reach_a_message(tmp_path):
    path = write(tmp_path / "x.safetensors", {"\x1b[2Jgone\n": entry(dtype="X")}, bytes(8))
    with pytest.raises(CheckpointError) as error:
        read_header(path)
    assert str(error.value).isprintable()


def test_a_file_cut_at_any_byte_is_refused_as_cut(small):
    whole = small.read_bytes()
    for length in range(len(whole)):
        small.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut.*; download it again"):
            read_header(small)


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_changed_file_is_refused_or_read_as_the_safetensors_package_reads_it(
    tmp_path_factory, data
):
    path = tmp_path_factory.mktemp("fuzz") / "model.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        cut = data.draw(st.integers(0, 3))
        raw[at : at + cut] = data.draw(st.binary(max_size=4))
    path.write_bytes(raw)
    try:
        header = read_header(path)
    except CheckpointError:
        return
    with safe_open(path, framework="numpy") as file:
        assert {t.name for t in header.tensors} == set(file.keys())


DIMS_END = b'1],"dtype":"U8","data_offsets":[0,0]}}'
BOMBS = {
    "arrays": lambda: b'{"a":[' + b"[]," * 20_000_000 + b"[]]}",
    "depth": lambda: b'{"a":' + b"[" * 67_000_000 + b"}",
    "metadata": lambda: b'{"__metadata__":{' + b'"a":"",' * 8_000_000 + b'"b":""}}',
    "many tensors": lambda: entries(1_000_000),
    "most tensors": lambda: entries(safetensors.MAX_TENSORS),
    "dims": lambda: b'{"a":{"shape":[' + b"9223372036854775807," * 900_000 + DIMS_END,
    "spaces": lambda: b"{" + b" " * 67_000_000 + b"}",
    "wide text": lambda: b'{"a' + b"a" * 60_000_000 + "\U0001f600".encode() + b'":1}',
    "long name": lambda: b'{"' + b"n" * 67_000_000 + b'":1}',
}


def entries(count: int) -> bytes:
    one = '"%07d":{"dtype":"U8","shape":[],"data_offsets":[%d,%d]}'
    return ("{" + ",".join(one % (i, i, i + 1) for i in range(count)) + "}").encode()


@pytest.mark.parametrize("case", BOMBS)
def test_a_bomb_takes_under_two_seconds_and_300_mb(tmp_path, case):
    path = write(tmp_path / "bomb.safetensors", BOMBS[case]())
    assert_bounded("uma.checkpoint.safetensors", path)


def shard(folder: Path, name: str, *tensors: str) -> None:
    save_file({tensor: np.zeros(4, np.float32) for tensor in tensors}, folder / name)


def index(folder: Path, **weight_map: str) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def names(headers: tuple[safetensors.Header, ...]) -> set[str]:
    return {tensor.name for header in headers for tensor in header.tensors}


def test_a_folder_gives_the_tensors_of_all_its_shards(tmp_path):
    shard(tmp_path, "model-00001-of-00002.safetensors", "a", "b")
    shard(tmp_path, "model-00002-of-00002.safetensors", "c")
    index(
        tmp_path,
        a="model-00001-of-00002.safetensors",
        b="model-00001-of-00002.safetensors",
        c="model-00002-of-00002.safetensors",
    )
    headers = safetensors.headers_of_folder(tmp_path)
    assert names(headers) == {"a", "b", "c"}
    assert sum(header.size_bytes for header in headers) == 3 * 4 * 4


def test_a_folder_without_index_gives_what_mlx_lm_would_load(tmp_path):
    shard(tmp_path, "model.safetensors", "a")
    shard(tmp_path, "adapters.safetensors", "z")
    assert names(safetensors.headers_of_folder(tmp_path)) == {"a"}


def test_missing_shards_are_named(tmp_path):
    shard(tmp_path, "model-00001-of-00002.safetensors", "a")
    with pytest.raises(CheckpointError, match=r"1 of 2 .* model-00002-of-00002\.safetensors"):
        safetensors.weight_files(tmp_path)
    index(tmp_path, a="model-00001-of-00002.safetensors", b="model-00009.safetensors")
    with pytest.raises(CheckpointError, match=r"model-00009\.safetensors"):
        safetensors.weight_files(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/etc/x.safetensors", "a\\b.safetensors", "C:x.safetensors",
     "x.bin", "a\x00b.safetensors", "a\nb.safetensors", "", 7],
)  # fmt: skip
def test_an_index_never_names_a_path(tmp_path, name):
    shard(tmp_path, "model.safetensors", "a")
    index(tmp_path, a=name)
    with pytest.raises(CheckpointError, match="not the name of a safetensors file"):
        safetensors.weight_files(tmp_path)


def test_the_same_tensor_in_two_files_is_refused(tmp_path):
    shard(tmp_path, "model-a.safetensors", "a")
    shard(tmp_path, "model-b.safetensors", "a")
    with pytest.raises(CheckpointError, match=r"in both .*model-a.* and .*model-b"):
        safetensors.headers_of_folder(tmp_path)
