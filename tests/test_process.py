"""Memory of this process."""

import sys

from uma.measurement.process import read_process_memory
from uma.units import MIB


def test_this_process_holds_memory_and_its_peak_is_no_lower() -> None:
    memory = read_process_memory()
    assert memory.current_bytes > 5 * MIB
    assert memory.kind == ("footprint" if sys.platform == "darwin" else "resident")
    assert memory.peak_bytes is not None
    assert memory.peak_bytes >= memory.current_bytes
