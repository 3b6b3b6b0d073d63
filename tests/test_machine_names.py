"""Names of machines: every spelling that people type, and what is not one thing."""

from collections.abc import Callable

import pytest

from uma import catalog
from uma.errors import UnknownName, UsageError
from uma.machine.named import machine_named
from uma.machine.names import (
    Entry,
    _apple,
    _matches,
    _others,
    _Query,
    find,
    machine_names,
    sold_machines,
)

UNSIZED = {"snapdragon-x2-elite", "panther-lake-core-ultra-x9-388h"}


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("mac-studio-m3-ultra-512", "mac-studio-m3-ultra-512"),
        ("Mac Studio (M3 Ultra 512GB)", "mac-studio-m3-ultra-512"),
        ("mac studio m2 ultra 192", "mac-studio-m2-ultra-192"),
        ("studio m2 ultra 192 gb", "mac-studio-m2-ultra-192"),
        ("MACBOOK-PRO-M4-PRO-48", "macbook-pro-m4-pro-48"),
        ('MacBook Pro 14" M3 Pro 18GB', "macbook-pro-m3-pro-18"),
        ("mbp m3 max 96", "macbook-pro-m3-max-96"),
        ("mba m2 16", "macbook-air-m2-16"),
        ("macbook pro 14 m4 16", "macbook-pro-m4-16"),
        ("iMac 24 M4 16GB", "imac-m4-16"),
        ("imac m4 24", "imac-m4-24"),
        ("m4-max-128", "m4-max-128"),
        ("Apple M4 Max 128GB", "m4-max-128"),
        ("M2Ultra192GB", "m2-ultra-192"),
        ("M2 Ultra 192 GiB unified memory", "m2-ultra-192"),
        ("64GB M4 Max, macOS 26.1", "m4-max-64"),
        ("m4 max 40-core gpu 64gb", "m4-max-64"),
        ("rtx-4090", "rtx-4090"),
        ("RTX 4090 24GB", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("RTX 4070Ti SUPER 16GB", "rtx-4070-ti-super"),
        ("rtx4070", "rtx-4070"),
        ("NVIDIA RTX A6000 48GB", "rtx-a6000"),
        ("RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("a100-80gb", "a100-sxm4-80gb"),
        ("NVIDIA A10G 24GB", "a10g"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm5-80gb"),
        ("h100", "h100-sxm5-80gb"),
        ("h100 nvl", "h100-nvl-94gb"),
        ("Tesla T4", "t4"),
        ("NVIDIA H200", "h200-sxm-141gb"),
        ("GB200", "gb200"),
        ("7900 XT", "radeon-rx-7900-xt"),
        ("7900xtx", "radeon-rx-7900-xtx"),
        ("AMD Instinct MI300X", "instinct-mi300x"),
        ("Arc B580", "arc-b580"),
        ("strix-halo-128", "framework-desktop-128gb"),
        ("Strix Halo 64GB", "framework-desktop-64gb"),
        ("Ryzen AI Max+ 395 128GB", "framework-desktop-128gb"),
        ("dgx-spark", "dgx-spark"),
        ("NVIDIA DGX Spark GB10 128GB unified", "dgx-spark"),
        ("gh200", "gh200"),
        ("Lunar Lake", "lunar-lake"),
    ],
)
def test_a_spelling_means_its_machine(spelling: str, name: str) -> None:
    assert find(spelling).entries[0].name == name


def test_every_name_of_the_catalog_means_itself() -> None:
    for name in machine_names():
        assert find(name).entries[0].name == name
        if name not in UNSIZED:
            assert machine_named(name).memory_bytes > 0


@pytest.mark.parametrize("read", [_apple, _others])
def test_reading_only_lines_with_the_words_of_a_name_loses_no_machine(
    read: Callable[..., tuple[Entry, ...]],
) -> None:
    for entry in read():
        for said in (entry.needed, entry.allowed, (*entry.needed, *entry.allowed)):
            query = _Query(said, (), None, None)
            meant = [one for one in read() if _matches(one, query)]
            assert [one for one in read(*said) if _matches(one, query)] == meant


def test_every_row_of_the_catalog_has_a_name() -> None:
    found = [entry.row for entries in sold_machines() for entry in entries]
    gpus = [row for row in catalog.gpus() if row.name != "GH200 96GB"]  # a machine, not a card
    rows = [*catalog.macs(), *gpus, *catalog.unified_machines()]
    assert sorted(found, key=repr) == sorted(rows, key=repr)


@pytest.mark.parametrize(
    ("spelling", "number", "name"),
    [
        ("2xh100", 2, "h100-sxm5-80gb"),
        ("8x A100 80GB SXM", 8, "a100-sxm4-80gb"),
        ("2 x NVIDIA RTX 3090 24GB", 2, "rtx-3090"),
        ("RTX 5090 x2", 2, "rtx-5090"),
        ("dual 3090", 2, "rtx-3090"),
        ("1xh100", 1, "h100-sxm5-80gb"),
    ],
)
def test_cards_can_be_counted(spelling: str, number: int, name: str) -> None:
    found = find(spelling)
    assert (found.number, found.entries[0].name) == (number, name)


@pytest.mark.parametrize("spelling", ["2x mac-studio-m3-ultra-512", "2xgh200", "0xh100"])
def test_machines_are_not_counted_as_cards(spelling: str) -> None:
    with pytest.raises(UsageError):
        find(spelling)


@pytest.mark.parametrize(
    ("spelling", "choice"),
    [
        ("A100", "a100-pcie-40gb, a100-sxm4-40gb, a100-pcie-80gb, a100-sxm4-80gb"),
        ("m4 max", "m4-max-36, m4-max-48, m4-max-64, m4-max-128"),
        ("mac studio 512", "mac-studio-m3-ultra-512, mac-studio-m5-ultra-512"),
        ("V100", "v100-pcie-16gb, v100-sxm2-16gb, v100-sxm2-32gb"),
    ],
)
def test_a_name_of_several_machines_lists_them(spelling: str, choice: str) -> None:
    with pytest.raises(UnknownName, match=f"may be {choice}; say which"):
        find(spelling)


@pytest.mark.parametrize(
    ("spelling", "sizes"),
    [
        ("mac-studio-m4-max-96", "36, 48, 64, 128 GB; --ram"),
        ("m4 max 32", "36, 48, 64, 128 GB; --ram"),
        ("rtx 4090 48gb", "24 GB; --vram"),
    ],
)
def test_memory_that_was_not_sold_is_answered_with_what_was(spelling: str, sizes: str) -> None:
    with pytest.raises(UnknownName, match=f"only with {sizes}"):
        find(spelling)


@pytest.mark.parametrize(
    ("spelling", "near"),
    [("rtx 4091", "rtx-4090"), ("mac-studoi-m3-ultra-512", "mac-studio-m3-ultra-512"),
     ("dgx-sprak", "dgx-spark"), ("rtx 4090 mini", "rtx-4090")],
)  # fmt: skip
def test_an_unknown_name_is_answered_with_the_three_nearest(spelling: str, near: str) -> None:
    with pytest.raises(UnknownName) as error:
        find(spelling)
    listed = str(error.value).partition("nearest: ")[2].partition(". ")[0].split(", ")
    assert near in listed
    assert len(listed) == 3


@pytest.mark.parametrize("spelling", ["", " ", "gpu", "24GB", "x", "+", "2x", "\x1b[2J"])
def test_a_name_of_nothing_is_unknown(spelling: str) -> None:
    with pytest.raises(UnknownName) as error:
        machine_named(spelling)
    assert str(error.value).isprintable()
