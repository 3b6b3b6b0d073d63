import pytest
from hypothesis import given
from hypothesis import strategies as st

from uma.units import GB, GIB, MIB, format_gib, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 * GIB),
        ("24GB", 24 * GB),
        ("24 gib", 24 * GIB),
        ("0.5GiB", GIB // 2),
        ("1536MiB", 1536 * MIB),
        ("7B", 7),
    ],
)
def test_a_size_is_read_in_the_base_that_its_unit_names(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "24", "GiB", "24G", "1e3GiB", "-1GiB", "24 GiB x", "nanGiB"])
def test_a_size_without_a_clear_unit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="24GiB"):
        parse_bytes(text)


@given(st.integers(min_value=0, max_value=2**62))
def test_whole_bytes_survive_being_written_and_read(size: int) -> None:
    assert parse_bytes(f"{size}B") == size


@given(st.integers(min_value=0, max_value=2**62))
def test_a_shown_size_is_within_a_hundredth_of_its_unit(size: int) -> None:
    shown = parse_bytes(format_gib(size).replace(",", ""))
    unit = GIB if size >= GIB else MIB if size >= MIB else 1024 if size >= 1024 else 1
    assert abs(shown - size) <= unit / 10
