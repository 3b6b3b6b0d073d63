"""The checks of ``uma doctor`` that need no model: versions, limits, disk, hub, programs."""

import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from uma.catalog import observed
from uma.catalog.observed import KnownBad
from uma.machine import Machine, budget_of, mac_of, read_machine
from uma.measurement import checks
from uma.measurement.bundle import kept_lines, machine_of_readings
from uma.system.darwin import Readings
from uma.units import GIB


def mac(chip: str = "Apple M4 Max", version: str = "26.4", **sysctl: object) -> Machine:
    lines = {
        "hw.memsize": 64 * GIB,
        "hw.optional.arm64": 1,
        "machdep.cpu.brand_string": chip,
        "kern.osproductversion": version,
        **{name.replace("__", "."): value for name, value in sysctl.items()},
    }
    return mac_of(Readings("".join(f"{k}: {v}\n" for k, v in lines.items()), "", ""))


# --- checks -------------------------------------------------------------------------------------

GOOD = {"mlx": "0.32.4", "mlx-metal": "0.32.4", "mlx-lm": "0.32.2", "transformers": "5.24.0"}


def known(machine: Machine, **versions: str) -> set[str]:
    """Packages of which a fault is known with these versions, the notes left out."""
    installed = GOOD | {name.replace("_", "-"): number for name, number in versions.items()}
    found = checks.check_known_bad(installed, machine)
    return {c.text.split()[0] for c in found if c.state in ("failure", "warning")}


def test_versions_of_today_have_no_known_fault() -> None:
    assert known(mac()) == set()
    assert known(read_machine()) == set()


@pytest.mark.parametrize(
    ("machine", "versions", "packages"),
    [
        (mac("Apple A18 Pro"), {"mlx": "0.30.4"}, {"mlx"}),
        (mac("Apple A18 Pro"), {"mlx": "0.32.0"}, set()),
        (mac(), {"mlx": "0.31.2"}, {"mlx"}),
        (mac("Apple M5 Max"), {"mlx": "0.32.2"}, {"mlx"}),
        (mac("Apple M5 Max"), {"mlx": "0.32.3"}, set()),
        (mac(), {"mlx": "0.32.2"}, set()),
        (mac(), {"mlx_lm": "0.31.2"}, {"mlx-lm"}),
        (mac(), {"transformers": "5.13.0", "mlx_lm": "0.31.3"}, {"transformers"}),
        (mac(), {"transformers": "5.13.0"}, set()),
        (mac(version="13.6"), {}, {"macOS"}),
    ],
)
def test_a_known_fault_is_told_of_the_versions_and_machines_that_have_it(
    machine: Machine, versions: dict[str, str], packages: set[str]
) -> None:
    assert known(machine, **versions) == packages


def test_a_fault_is_told_with_its_remedy_and_its_source() -> None:
    row = KnownBad("mlx", "1.0", "1.5", "", "", "", "failure", "it fails", "update", "a ; b")
    (found,) = checks.check_known_bad({"mlx": "1.4.9.dev1"}, mac(), [row])
    assert (found.state, found.remedy) == ("failure", "update")
    assert found.text == "mlx 1.4.9.dev1: it fails (a)"
    for version in ("0.9", "1.5", "1.5.0"):
        (found,) = checks.check_known_bad({"mlx": version}, mac(), [row])
        assert found.state == "ok"


def test_every_row_of_known_faults_can_be_found_and_names_a_public_page() -> None:
    for row in observed.known_bad():
        assert row.source.startswith("https://"), row
        assert row.severity in ("failure", "warning", "note")
        assert row.effect
        assert row.remedy
        assert row.package in (*checks.PACKAGES, "macOS")


def test_mlx_of_two_versions_is_a_failure_and_a_missing_one_is_not() -> None:
    assert checks.check_packages(GOOD).state == "ok"
    assert checks.check_packages(GOOD | {"mlx-metal": "0.32.3"}).state == "failure"
    found = checks.check_packages({"numpy": "2.4"})
    assert found.state == "warning"
    assert "mlx, mlx-lm missing" in found.text


def test_an_override_that_is_not_believed_is_a_warning() -> None:
    machine = mac(iogpu__wired_limit_mb=999_999_999)
    found = checks.check_memory(machine, budget_of(machine))
    assert [check.state for check in found] == ["ok", "warning"]
    assert "iogpu.wired_limit_mb" in found[1].text


def test_a_folder_that_is_not_there_yet_is_looked_at_on_its_disk(tmp_path: Path) -> None:
    found = checks.check_disk("models", tmp_path / "not" / "yet")
    assert re.match(r"[\d.,]+ GiB free for models", found.text)


@pytest.fixture
def silent_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hub that takes the connection and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
        yield


def test_a_hub_that_does_not_answer_takes_no_more_than_its_time(silent_server: None) -> None:
    start = time.monotonic()
    found = checks.check_hub(0.3)
    assert time.monotonic() - start < 2
    assert found.state == "warning"
    assert found.remedy is not None
    assert "HF_ENDPOINT" in found.remedy


def test_a_name_lookup_that_hangs_takes_no_more_than_that_either(
    silent_server: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lookups know no timeout: on a network without a name server they take half a minute."""

    def lookup(*_: object, **__: object) -> None:
        time.sleep(3)
        raise OSError("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    start = time.monotonic()
    assert checks.check_hub(0.3).text.endswith("no answer within 0.3 s")
    assert time.monotonic() - start < 2


def test_a_hub_that_answers_is_fine_whatever_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Refusing(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_error(403)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
        assert checks.check_hub(5).state == "ok"


def test_offline_is_a_choice_and_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert checks.check_hub().state == "note"


def test_a_program_that_holds_much_is_named() -> None:
    code = "import time; x = bytearray(1200 << 20); print(flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        found = checks.check_processes()
    finally:
        child.kill()
        child.communicate()
    assert found.state == "note"
    assert "1.1" in found.text or "1.2" in found.text


def test_only_lines_of_a_known_shape_are_kept_of_a_systems_answer() -> None:
    told = 'Pages free:                    1234.\nann: 5\n"Translation faults":       12.\n'
    assert kept_lines("vm_stat", told) == [
        "Pages free:                    1234.",
        '"Translation faults":       12.',
    ]
    cpuinfo = "model name\t: AMD EPYC\nSerial\t\t: 00000000abcd\n"
    assert kept_lines("cpuinfo", cpuinfo) == ["model name : AMD EPYC"]
    ioreg = '  "IOPlatformSerialNumber" = "C02"\n  "gpu-core-count" = 40\n'
    assert kept_lines("ioreg", ioreg) == ['"gpu-core-count" = 40']


# --- bundles of machines --------------------------------------------------------------------------

DATA = Path(__file__).parent / "data"


@pytest.mark.parametrize("ioreg", ["ioreg_agx_m3.txt", "ioreg_agx_m4max.txt"])
@pytest.mark.parametrize("vm_stat", ["vm_stat_32g_macos26.txt", "vm_stat_48g_mte.txt"])
def test_the_lines_that_a_bundle_keeps_describe_the_same_mac(vm_stat: str, ioreg: str) -> None:
    """Answers of real Macs, whole and as a bundle has them."""
    folder = DATA / "measure" / "macos"
    names = {"sysctl": "sysctl_m3ultra_96g.txt", "vm_stat": vm_stat, "ioreg": ioreg}
    whole = {kind: (folder / name).read_text("utf-8") for kind, name in names.items()}
    kept = {kind: kept_lines(kind, text) for kind, text in whole.items()}
    machine = mac_of(Readings(**whole))
    assert machine_of_readings({"system": "darwin", **kept}) == machine
    assert machine.available_bytes is not None
    assert machine.gpu_cores is not None
    assert len(kept["ioreg"]) == 1


MACHINES = sorted((DATA / "machines").glob("*.json"))


@pytest.mark.parametrize("path", MACHINES, ids=lambda path: path.stem)
def test_a_machine_that_was_added_is_described_as_it_was_checked(path: Path) -> None:
    """Made of bundles by ``scripts/add_machine.py``."""
    made = json.loads(path.read_text(encoding="utf-8"))
    machine = machine_of_readings(made["readings"], made["device_info"])
    assert {name: getattr(machine, name) for name in made["machine"]} == made["machine"]
    assert machine.available_bytes is not None
