"""What a reader of strangers' files may spend on one: 2 seconds and 300 MB."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys, time
from importlib import import_module
from uma.errors import CheckpointError
read_header = import_module(sys.argv[1]).read_header
before = time.process_time()
try:
    read_header(sys.argv[2])
except CheckpointError as error:
    assert len(str(error)) < 2000
seconds = time.process_time() - before
from uma.measurement.process import read_process_memory
print(seconds, read_process_memory().peak_bytes)
"""


def assert_bounded(module: str, path: Path) -> None:
    """Have another process read the header of ``path``, and look at what it took."""
    root = Path(__file__).parent.parent
    command = [sys.executable, "-c", PROGRAM, module, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    path.unlink()
    assert done.returncode == 0, done.stderr
    seconds, peak_bytes = done.stdout.split()
    assert float(seconds) < 2
    assert int(peak_bytes) < 300_000_000
