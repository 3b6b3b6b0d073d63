"""On Linux, a fast BLAS under MLX's CPU backend.

The mlx-cpu wheel links the reference BLAS. The dynamic linker takes ``cblas_sgemm`` from the first
library that was loaded globally, so an OpenBLAS loaded before ``mlx.core`` replaces it. PyPI's
``cmeel-openblas`` brings one with plain symbol names; it asks for ``libgfortran.so.5``, which a
bare machine lacks but the mlx-cpu wheel carries under a name of its own. A copy of that file that
answers to the plain name, kept in uma's cache, closes the gap.
"""

import ctypes
import hashlib
import os
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_GFORTRAN = "libgfortran.so.5"
_OPENBLAS = "libopenblas.so.0"
_TRIAL = """
import ctypes, sys
for path in sys.argv[1:]:
    blas = ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
n, one = 64, ctypes.c_float(1)
a, b, c = ((ctypes.c_float * (n * n))(*[value] * (n * n)) for value in (1, 2, 0))
blas.cblas_sgemm(101, 111, 112, n, n, n, one, a, n, b, n, one, c, n)
sys.exit(c[n * n - 1] != 2 * n)
"""


@dataclass(frozen=True, slots=True)
class Blas:
    """Which library multiplies float32 matrices on MLX's CPU backend.

    ``reason`` says why it is not OpenBLAS, and what that costs.
    """

    name: str
    reason: str | None = None


def prepare_cpu(cache_folder: Path) -> Blas:
    """Load OpenBLAS for MLX to use; call it before anything imports ``mlx.core``.

    Elsewhere than on Linux nothing is done: MLX uses Accelerate on macOS. Nothing raises: what
    went wrong is the ``reason`` of the result. There is a thread for each physical core that the
    process may use, or what ``OPENBLAS_NUM_THREADS`` says.
    """
    if sys.platform != "linux":
        return Blas("Accelerate" if sys.platform == "darwin" else "unknown")
    if loaded := _in_force():
        return loaded
    if "mlx.core" in sys.modules:
        return _reference("mlx was imported before OpenBLAS could be loaded")
    library = _installed()
    try:
        if library is None:
            ctypes.CDLL(_OPENBLAS, ctypes.RTLD_GLOBAL)
        else:
            _load(library, cache_folder)
        if "OPENBLAS_NUM_THREADS" not in os.environ:
            ctypes.CDLL(None).openblas_set_num_threads(physical_cores())
    except (OSError, AttributeError, subprocess.TimeoutExpired) as error:
        if library is None:
            return _reference("OpenBLAS is not installed", "; `pip install cmeel-openblas` helps")
        return _reference(f"OpenBLAS is not loaded ({error})")
    return _in_force() or _reference("the OpenBLAS found lacks cblas_sgemm")


def physical_cores() -> int:
    """Cores that this process may run on, each counted once however many threads it has."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list")
        cores.add(path.read_text() if path.is_file() else str(cpu))
    return len(cores)


def _reference(reason: str, remedy: str = "") -> Blas:
    # 512x576x1536 in float32 on 2 cores of an AMD EPYC (Zen 4): 242 ms against 5 to 8.
    lost = f"float32 matrices multiply about 30 times slower{remedy}"
    return Blas("reference BLAS", reason=f"{reason}: {lost}")


def _in_force() -> Blas | None:
    """OpenBLAS, if the process-wide names lead to it."""
    try:
        names = ctypes.CDLL(None)
        config = names.openblas_get_config
        names.cblas_sgemm  # noqa: B018  looked up: AttributeError where it is missing
    except AttributeError:
        return None
    config.restype = ctypes.c_char_p
    version = " ".join(config().decode("ascii", "replace").split()[:2])
    return Blas(version)


def _installed() -> Path | None:
    """cmeel-openblas's library on ``sys.path``."""
    paths = (Path(p) / "cmeel.prefix" / "lib" / _OPENBLAS for p in sys.path if p)
    return next((path for path in paths if path.is_file()), None)


def _load(library: Path, cache_folder: Path) -> None:
    libraries = [*_fortran(library, cache_folder), library]
    # cmeel-openblas is built for one processor (0.3.31: Skylake-X, which has AVX-512); on an
    # older one its instructions would end the process.
    if not _known_to_run(libraries, cache_folder):
        raise OSError("cmeel-openblas does not run on this processor")
    for path in libraries:
        ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)


def _fortran(library: Path, cache_folder: Path) -> list[Path]:
    """The libraries to load before ``library``: none where the system has Fortran's."""
    try:
        ctypes.CDLL(_GFORTRAN, ctypes.RTLD_GLOBAL)
        return []
    except OSError:
        carried = library.parents[2] / "mlx_cpu.libs"
    gfortran = next(carried.glob("libgfortran*.so*"), None)
    if gfortran is None:
        raise OSError(f"{_GFORTRAN} is neither on the system nor in {carried}")
    return [*carried.glob("libquadmath*.so*"), _under_plain_name(gfortran, cache_folder)]


def _known_to_run(libraries: list[Path], cache_folder: Path) -> bool:
    """Whether they run here, which is tried once for each library and processor."""
    status = libraries[-1].stat()
    asked = f"{status.st_size}-{status.st_mtime_ns} {_processor()}".encode()
    known = cache_folder / "blas" / f"runs-{hashlib.sha256(asked).hexdigest()[:16]}"
    if not known.is_file() and runs_here(libraries):
        known.parent.mkdir(parents=True, exist_ok=True)
        known.touch()
    return known.is_file()


def _processor() -> str:
    """The instruction sets of the first processor as Linux lists them."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def runs_here(libraries: list[Path]) -> bool:
    """Whether another process can load the libraries and multiply two matrices with the last."""
    command = [sys.executable, "-I", "-S", "-c", _TRIAL, *map(str, libraries)]
    return subprocess.run(command, capture_output=True, check=False, timeout=60).returncode == 0


def _under_plain_name(library: Path, cache_folder: Path) -> Path:
    """A copy of ``library`` that the linker accepts as ``libgfortran.so.5``, made once."""
    # The wheel's name for the file ends in a hash of its content.
    folder = cache_folder / "blas" / f"{library.name}-{library.stat().st_size}"
    copy = folder / _GFORTRAN
    if not copy.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{_GFORTRAN}.{os.getpid()}"
        partial.write_bytes(with_soname(library.read_bytes(), _GFORTRAN))
        os.replace(partial, copy)
    return copy


def with_soname(elf: bytes, name: str) -> bytes:
    """The 64-bit little-endian shared object ``elf`` with the string of its DT_SONAME replaced.

    Offsets are those of the ELF-64 specification: e_phoff at 32, program headers of 56 bytes,
    dynamic entries of 16.

    Raises:
        OSError: If it is another kind of file, is cut, has no DT_SONAME, or the name does not fit.
    """
    if elf[:6] != b"\x7fELF\x02\x01":
        raise OSError("not a 64-bit little-endian ELF file")
    try:
        at, room = _soname_place(elf)
    except (struct.error, StopIteration, ValueError) as error:
        raise OSError("a cut or damaged ELF file") from error
    new = name.encode()
    if len(new) > room:
        raise OSError(f"{name} is longer than the name it replaces")
    return elf[:at] + new.ljust(room, b"\0") + elf[at + room :]


def _soname_place(elf: bytes) -> tuple[int, int]:
    """Where the string of DT_SONAME begins, and its length."""
    start, count = struct.unpack_from("<Q", elf, 32)[0], struct.unpack_from("<H", elf, 56)[0]
    headers = [struct.unpack_from("<IIQQQQQQ", elf, start + 56 * i) for i in range(count)]
    dynamic = next((h for h in headers if h[0] == 2), None)
    entries = {}
    if dynamic is not None:
        _, _, offset, _, _, size, _, _ = dynamic
        entries = dict(struct.iter_unpack("<QQ", elf[offset : offset + size]))
    if 5 not in entries or 14 not in entries:
        raise OSError("no DT_STRTAB or no DT_SONAME")
    table = entries[5]
    at = next(h[2] + table - h[3] for h in headers if h[0] == 1 and h[3] <= table < h[3] + h[5])
    at += entries[14]
    return at, elf.index(b"\0", at) - at
