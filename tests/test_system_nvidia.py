"""NVIDIA cards: recorded answers of the tool, and a library that NVIDIA's own binding loads."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from uma.machine.here import MIG_NOTE, SPILL_NOTE, WSL_NOTE, with_cards
from uma.machine.live import linux_of
from uma.system import nvidia
from uma.system.linux import Readings
from uma.units import GIB, MIB

LINUX = Path(__file__).parent / "data" / "measure" / "linux"
CARDS = (LINUX / "nvidia_smi_cards.csv").read_text()
NEEDS = {"sh": shutil.which("sh"), "cc": shutil.which("cc")}
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the library's name is Linux's")

# memory.free of the same ten captures, which the driver computes itself.
FREE_MIB = (7571, 7582, 15348, 81081, 81022, 143103, 143158, 45460, 7286, 7191)


def pc(available_gib: int = 50):  # type: ignore[no-untyped-def]
    meminfo = f"MemTotal: {64 * GIB >> 10} kB\nMemAvailable: {available_gib * GIB >> 10} kB\n"
    return linux_of(Readings(meminfo, "model name : Ryzen\n", "6.8", ()))


# --- the tool -------------------------------------------------------------------------------


def test_what_is_neither_used_nor_reserved_is_what_the_driver_calls_free() -> None:
    cards = nvidia.parse_cards(CARDS)
    assert len(cards) == len(FREE_MIB)
    for card, free in zip(cards, FREE_MIB, strict=True):
        left = card.memory_bytes - card.used_bytes - card.reserved_bytes
        assert left == pytest.approx(free * MIB, abs=2 * MIB), card  # each is rounded to MiB


def test_a_slot_carries_what_pci_express_of_its_generation_does() -> None:
    by_name = {card.name: card for card in nvidia.parse_cards(CARDS)}
    # 15.75, 31.5 and 63 GB/s: as vendors print 16 lanes of generation 3, 4 and 5.
    for name, gb_per_s in (("2080 SUPER", 15.75), ("4080 SUPER", 31.5), ("H100 80GB HBM3", 63.0)):
        card = next(c for n, c in by_name.items() if n.endswith(name))
        assert card.link_bytes_per_s == pytest.approx(gb_per_s * 1e9, rel=1e-3)
    assert nvidia.link_bytes_per_s(7, 16) is None


def test_a_divided_card_is_recognized() -> None:
    assert [card.mig for card in nvidia.parse_cards(CARDS)] == [
        False, False, False, False, True, True, False, False, False, False,
    ]  # fmt: skip


def smi(folder: Path, body: str) -> str:
    path = folder / "nvidia-smi"
    path.write_text(f"#!{NEEDS['sh']}\n{body}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.skipif(NEEDS["sh"] is None, reason="needs a shell")
def test_a_driver_that_does_not_know_a_field_is_asked_for_fewer(tmp_path: Path) -> None:
    refuses = (
        'case "$1" in *memory.reserved*)\n'
        "echo 'Field \"memory.reserved\" is not a valid field to query.'; exit 2;; esac\n"
        'echo "NVIDIA GeForce RTX 3090, 24576 MiB, 300 MiB"'
    )
    (card,) = nvidia.read_with_tool(smi(tmp_path, refuses))
    assert (card.memory_bytes, card.used_bytes) == (24576 * MIB, 300 * MIB)
    assert card.reserved_bytes is None


@pytest.mark.skipif(NEEDS["sh"] is None, reason="needs a shell")
def test_a_tool_that_fails_lists_nothing(tmp_path: Path) -> None:
    assert nvidia.read_with_tool(smi(tmp_path, "echo failed; exit 9")) == ()
    assert nvidia.read_with_tool(str(tmp_path / "missing")) == ()


# --- the library ----------------------------------------------------------------------------

# What the functions of libnvidia-ml.so.1 answer, with their own signatures (NVIDIA's nvml.h).
LIBRARY = """
#include <string.h>
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } v2;
typedef struct { unsigned long long total, free, used; } v1;
int nvmlInitWithFlags(unsigned f) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int r) { return "recorded"; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { *h = (void *)1; return 0; }
int nvmlDeviceGetName(void *h, char *s, unsigned n) { strncpy(s, NAME, n); return 0; }
int nvmlDeviceGetMemoryInfo(void *h, v1 *m) {
  m->total = TOTAL; m->free = TOTAL - USED; m->used = USED; return RESULT; }
#ifndef OLD
int nvmlDeviceGetMemoryInfo_v2(void *h, v2 *m) {
  if (m->version != (sizeof(v2) | 2 << 24)) return 25;
  m->total = TOTAL; m->reserved = RESERVED; m->used = USED;
  m->free = TOTAL - USED - RESERVED; return RESULT; }
#endif
int nvmlDeviceGetMaxPcieLinkGeneration(void *h, unsigned *n) { *n = 5; return 0; }
int nvmlDeviceGetMaxPcieLinkWidth(void *h, unsigned *n) { *n = 16; return 0; }
typedef struct { unsigned gpu, memory; } rates;
int nvmlDeviceGetUtilizationRates(void *h, rates *r) {
  r->gpu = BUSY; return BUSY < 0 ? 3 : 0; }
int nvmlDeviceGetPowerUsage(void *h, unsigned *n) { *n = 11170; return BUSY < 0 ? 3 : 0; }
typedef struct { unsigned pid; unsigned long long used; unsigned instance, compute; } process;
int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *n, process *p) {
  if (*n < 2) { *n = 2; return 7; }
  process two[] = {{4242, 5ULL << 30, 0, 0}, {4343, ~0ULL, 0, 0}};
  memcpy(p, two, sizeof two); *n = 2; return 0; }
"""


def through_nvml(folder: Path, **facts: object) -> str:
    """What ``read_cards`` returns in a process that finds such a library, and no working tool."""
    pytest.importorskip("pynvml")
    defines = {"RESULT": 0, "USED": "0ULL", "RESERVED": "0ULL", "BUSY": -1, **facts}
    smi(folder, "exit 9")
    source = folder / "nvml.c"
    source.write_text(LIBRARY)
    flags = [f"-D{name}={value}" for name, value in defines.items()]
    target = folder / "libnvidia-ml.so.1"
    subprocess.run([NEEDS["cc"], "-shared", "-fPIC", *flags, "-o", target, source], check=True)
    program = (
        "import pynvml; from uma.system.nvidia import process_bytes, read_cards; "
        "print(read_cards()); pynvml.nvmlInit(); print(process_bytes(pynvml))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "LD_LIBRARY_PATH": str(folder), "PATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@on_linux
@pytest.mark.skipif(NEEDS["cc"] is None, reason="needs a C compiler")
def test_the_library_tells_what_the_tool_told_on_the_same_card(tmp_path: Path) -> None:
    told = through_nvml(
        tmp_path,
        NAME='"NVIDIA H100 80GB HBM3"',
        TOTAL=f"{81559 * MIB}ULL",
        RESERVED=f"{479 * MIB}ULL",
    )
    (line,) = [line for line in CARDS.splitlines() if "H100" in line and "Disabled" in line]
    assert told.splitlines()[0] == str(nvidia.parse_cards(line))


@on_linux
@pytest.mark.skipif(NEEDS["cc"] is None, reason="needs a C compiler")
def test_the_library_tells_who_holds_what_and_how_busy_the_card_is(tmp_path: Path) -> None:
    told = through_nvml(tmp_path, NAME='"NVIDIA GB10"', TOTAL="0ULL", RESULT=3, BUSY=37)
    cards, processes = told.splitlines()
    assert "busy_percent=37.0, power_w=11.17" in cards
    assert processes == str({4242: 5 * GIB})  # the other one's size is "not available"


@on_linux
@pytest.mark.skipif(NEEDS["cc"] is None, reason="needs a C compiler")
def test_an_older_driver_tells_no_reserve(tmp_path: Path) -> None:
    told = through_nvml(
        tmp_path, NAME='"NVIDIA GeForce RTX 3090"', TOTAL=f"{24576 * MIB}ULL", USED="1ULL", OLD=1
    )
    assert f"memory_bytes={24576 * MIB}, used_bytes=1, reserved_bytes=None" in told


@on_linux
@pytest.mark.skipif(NEEDS["cc"] is None, reason="needs a C compiler")
def test_gb10_tells_no_memory_of_its_own(tmp_path: Path) -> None:
    # NVML_ERROR_NOT_SUPPORTED, as a DGX Spark answered (XuehaiPan/nvitop pull request 208).
    told = through_nvml(tmp_path, NAME='"NVIDIA GB10"', TOTAL="0ULL", RESULT=3)
    assert "name='NVIDIA GB10', memory_bytes=None, used_bytes=None" in told


# --- the machine ----------------------------------------------------------------------------


def test_a_card_makes_the_pc_a_discrete_machine_with_two_pools() -> None:
    (card,) = nvidia.parse_cards(CARDS.splitlines()[2])
    machine = with_cards(pc(), (card,))
    assert (machine.kind, machine.backend) == ("discrete", "cpu")
    assert machine.memory_bytes == 16376 * MIB
    assert machine.limit_bytes == (16376 - 434) * MIB
    assert machine.limit_high_bytes is None
    assert machine.available_bytes == (16376 - 434 - 596) * MIB
    assert (machine.host_memory_bytes, machine.host_available_bytes) == (64 * GIB, 50 * GIB)
    assert machine.devices[0].bandwidth_bytes_per_s == 736_000_000_000  # of the catalog
    assert machine.notes == ()


def test_where_the_driver_keeps_an_unknown_part_the_limit_is_a_range() -> None:
    machine = with_cards(pc(), (nvidia.Card("NVIDIA GeForce RTX 3090", 24576 * MIB),))
    assert machine.limit_bytes < machine.limit_high_bytes < 24576 * MIB
    assert machine.available_bytes is None


def test_two_cards_share_the_model_less_one_context() -> None:
    card = nvidia.parse_cards(CARDS.splitlines()[2])[0]
    one, two = with_cards(pc(), (card,)), with_cards(pc(), (card, card))
    context = 2 * one.limit_bytes - two.limit_bytes
    assert 100 * MIB < context < 600 * MIB
    assert two.name == "2 x NVIDIA GeForce RTX 4080 SUPER"
    assert "are taken off for the contexts of all but the first" in two.notes[0]


def test_a_card_of_an_unknown_name_is_still_a_card() -> None:
    machine = with_cards(pc(), (nvidia.Card("NVIDIA Next 9999", 8 * GIB, 0, 0),))
    assert machine.limit_bytes == 8 * GIB
    assert machine.bandwidth_bytes_per_s is None


def test_gb10_has_one_memory_and_it_is_the_machines() -> None:
    meminfo = (LINUX / "proc_meminfo_gb10_partial.txt").read_text()
    here = linux_of(Readings(meminfo, "", "6.14", ()))
    machine = with_cards(here, nvidia.parse_cards("NVIDIA GB10, [N/A]\n"))
    assert machine.kind == "unified"
    assert machine.limit_bytes == here.memory_bytes
    assert machine.devices == ()


def test_wsl_and_windows_and_mig_are_told_about() -> None:
    cards = nvidia.parse_cards(CARDS)
    assert with_cards(pc(), cards[:1], wsl=True).notes == (SPILL_NOTE, WSL_NOTE)
    windows = replace(pc(), os="Windows")
    assert with_cards(windows, cards[8:9]).notes == (SPILL_NOTE,)
    assert MIG_NOTE in with_cards(pc(), cards[4:5]).notes


def test_without_a_card_the_machine_stays_what_it_is() -> None:
    assert with_cards(pc(), ()) == pc()
