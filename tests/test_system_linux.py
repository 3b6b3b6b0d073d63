"""Linux readings: this machine against psutil, recorded answers, and trees of control groups."""

import sys
from pathlib import Path

import pytest

from uma.errors import UmaError
from uma.machine import linux_of
from uma.system import linux, nvidia
from uma.units import GIB, MIB

LINUX = Path(__file__).parent / "data" / "measure" / "linux"
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


def text(name: str) -> str:
    return (LINUX / name).read_text(encoding="utf-8")


def tree(root: Path, files: dict[str, str]) -> Path:
    """The files of a machine below ``root``, the recorded 24 GB one unless said otherwise."""
    for name, content in {"proc/meminfo": text("proc_meminfo_x86_24g.txt"), **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def test_kib_lines_are_read_in_bytes_and_counts_are_left_out() -> None:
    meminfo = linux.parse_kib(text("proc_meminfo_x86_24g.txt"))
    assert meminfo["MemTotal"] == 24684092 * 1024
    assert meminfo["MemAvailable"] == 23664504 * 1024
    assert "HugePages_Total" not in meminfo
    assert linux.parse_kib(text("proc_status.txt"))["VmHWM"] == 2208 * 1024


@on_linux
def test_memory_of_this_machine_is_what_psutil_says() -> None:
    import psutil

    meminfo = linux.parse_kib(linux.read().meminfo)
    memory = psutil.virtual_memory()
    assert meminfo["MemTotal"] == memory.total
    assert meminfo["MemAvailable"] == pytest.approx(memory.available, abs=256 * MIB)


@on_linux
def test_own_resident_size_and_peak_are_what_the_kernel_reports_elsewhere() -> None:
    import mmap
    import resource

    import psutil

    # A mapping of its own: what malloc gives may be taken from, and go back to, its free space.
    block = mmap.mmap(-1, 64 * MIB)
    block[::4096] = b"1" * len(block[::4096])
    now, peak = linux.read_own_memory()
    assert now == pytest.approx(psutil.Process().memory_info().rss, abs=8 * MIB)
    assert peak == pytest.approx(
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, abs=8 * MIB
    )
    block.close()
    after, peak_after = linux.read_own_memory()
    assert now - after >= 60 * MIB
    assert peak_after == pytest.approx(peak, abs=MIB)


def test_a_process_without_figures_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UmaError, match="VmRSS"):
        linux.read_own_memory(tmp_path)


def test_no_control_group_means_installed_memory(tmp_path: Path) -> None:
    machine = linux_of(linux.read(tree(tmp_path, {})))
    assert machine.limit_bytes == machine.memory_bytes == 24684092 * 1024
    assert machine.available_bytes == 23664504 * 1024
    assert machine.limit_source == "installed memory"
    assert machine.backend == "cpu"


def test_the_tightest_group_of_version_2_on_the_way_up_is_the_limit(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user.slice/job.scope\n",
            "sys/fs/cgroup/user.slice/job.scope/memory.max": "max\n",
            "sys/fs/cgroup/user.slice/memory.max": str(6 * GIB),
            "sys/fs/cgroup/user.slice/memory.current": str(3 * GIB),
            "sys/fs/cgroup/user.slice/memory.stat": f"anon 5\ninactive_file {GIB}\n",
        },
    )
    machine = linux_of(linux.read(root))
    assert machine.limit_bytes == 6 * GIB
    assert machine.limit_source == "control group, memory.max"
    assert machine.available_bytes == 4 * GIB  # 6 less 3 in use, of which 1 can be dropped


def test_a_group_of_version_1_is_found_from_inside_a_container(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/1f\n4:memory:/docker/1f\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GIB),
            "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB),
        },
    )
    machine = linux_of(linux.read(root))
    assert machine.limit_bytes == 2 * GIB
    assert machine.available_bytes == GIB


@pytest.mark.parametrize("none", ["9223372036854771712", "9223372036854775807", "max"])
def test_a_group_without_a_limit_limits_nothing(tmp_path: Path, none: str) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": none + "\n",
    }
    assert linux.read(tree(tmp_path, files)).groups == ()


def test_a_group_path_cannot_lead_out_of_the_mount(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/../../..\n",
        "sys/fs/cgroup/memory.max": str(GIB),
        "memory.max": str(MIB),
    }
    (group,) = linux.read(tree(tmp_path, files)).groups
    assert group.limit_bytes == GIB


def test_a_malformed_limit_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "lots\n"}
    with pytest.raises(UmaError, match=r"memory\.max says 'lots'"):
        linux.read(tree(tmp_path, files))


def test_a_machine_without_meminfo_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UmaError, match="MemTotal"):
        linux_of(linux.read(tmp_path))


def test_a_processor_without_a_model_name_is_named_by_its_system(tmp_path: Path) -> None:
    machine = linux_of(linux.read(tree(tmp_path, {"proc/cpuinfo": "CPU part\t: 0xd87\n"})))
    assert machine.cpu is None
    assert machine.name == "Linux, 23.54 GiB"


def test_a_card_that_shares_the_memory_of_the_machine_has_none_of_its_own() -> None:
    total = text("nvidia_smi_gb10.csv").splitlines()[1].split(",")[0]
    cards = nvidia.parse_cards(f"NVIDIA GB10, {total}\nNVIDIA GeForce RTX 4090, 24564 MiB\n")
    assert cards == (
        nvidia.Card("NVIDIA GB10", None),
        nvidia.Card("NVIDIA GeForce RTX 4090", 24564 * MIB),
    )
    assert nvidia.parse_cards("No devices were found\n") == ()
