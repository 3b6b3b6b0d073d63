"""OpenBLAS under MLX on Linux: found, loaded before mlx, in force, and otherwise said."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mlx.core")
if sys.platform != "linux":
    pytest.skip("MLX has Accelerate elsewhere", allow_module_level=True)

from uma.runtime.blas import runs_here, with_soname
from uma.runtime.threads import faster_threads, thread_setter

PROGRAM = """
import ctypes, json, sys, time
from dataclasses import asdict
from pathlib import Path
from uma.runtime.blas import prepare_cpu
if "late" in sys.argv:
    import mlx.core
blas = prepare_cpu(Path(sys.argv[1])) if "never" not in sys.argv else None
import mlx.core as mx
a = mx.random.normal((256, 512), key=mx.random.key(0))
b = mx.random.normal((512, 512), key=mx.random.key(1))
mx.eval(a, b, a @ b)
times = []
for _ in range(3):
    start = time.perf_counter()
    c = a @ b
    mx.eval(c)
    times.append(time.perf_counter() - start)
threads = getattr(ctypes.CDLL(None), "openblas_get_num_threads", lambda: None)()
found = {"blas": blas and asdict(blas), "threads": threads, "s": min(times)}
print(json.dumps(found | {"sum": mx.abs(c).sum().item()}))
"""


def run(cache: Path, *args: str, **variables: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(cache), *args],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def installed_library() -> Path | None:
    paths = (Path(p) / "cmeel.prefix" / "lib" / "libopenblas.so.0" for p in sys.path if p)
    return next((path for path in paths if path.is_file()), None)


needs_openblas = pytest.mark.skipif(
    installed_library() is None, reason="cmeel-openblas is not installed (extra `run`)"
)


@needs_openblas
def test_openblas_multiplies_for_mlx_and_much_faster(tmp_path: Path) -> None:
    fast = run(tmp_path, OPENBLAS_NUM_THREADS="1")  # more would depend on what else runs here
    slow = run(tmp_path, "never")
    assert fast["blas"]["name"].startswith("OpenBLAS 0.")
    assert fast["blas"]["reason"] is None
    assert fast["sum"] == pytest.approx(slow["sum"], rel=1e-4)
    # Measured: 30 to 50 times; 3 leaves room for whatever else the machine does.
    assert slow["s"] / fast["s"] > 3


@needs_openblas
def test_threads_are_those_that_the_user_asks_for(tmp_path: Path) -> None:
    assert run(tmp_path, OPENBLAS_NUM_THREADS="1")["threads"] == 1


@needs_openblas
def test_too_late_is_said_with_what_it_costs(tmp_path: Path) -> None:
    blas = run(tmp_path, "late")["blas"]
    assert blas["name"] == "reference BLAS"
    assert "imported before" in blas["reason"]
    assert "times slower" in blas["reason"]


@needs_openblas
def test_an_unwritable_cache_is_no_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    blas = run(blocked)["blas"]
    # With libgfortran.so.5 on the system there is nothing to write.
    assert blas["name"].startswith("OpenBLAS") or "not loaded" in blas["reason"]


def test_a_library_that_does_not_run_on_this_processor_is_not_loaded(tmp_path: Path) -> None:
    cut = tmp_path / "libopenblas.so.0"
    cut.write_bytes(Path(sys.executable).resolve().read_bytes()[:4096])
    assert not runs_here([cut])


def test_a_library_answers_to_its_new_name_in_the_real_linker(tmp_path: Path) -> None:
    import mlx.core as mx

    carried = Path(mx.__file__).parents[1] / "mlx_cpu.libs"
    source = next(carried.glob("libblas*.so*"), None)
    if source is None:
        pytest.skip("no library beside mlx to try it on")
    renamed = tmp_path / "anything.so"
    renamed.write_bytes(with_soname(source.read_bytes(), "libplain.so.3"))
    program = (
        "import ctypes, sys; ctypes.CDLL(sys.argv[1]); ctypes.CDLL('libplain.so.3'); print('found')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(renamed)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "found\n"


@pytest.mark.parametrize("content", [b"", b"\x7fELF\x02\x01", b"MZ" + bytes(200)])
def test_other_files_are_refused(content: bytes) -> None:
    with pytest.raises(OSError):  # noqa: PT011
        with_soname(content.ljust(64, b"\0") if len(content) == 6 else content, "x")


def test_a_cut_library_is_refused_wherever_it_is_cut() -> None:
    import mlx.core as mx

    whole = Path(mx.__file__).read_bytes()
    for size in (64, 500, 5000, len(whole) // 2):
        with pytest.raises(OSError, match=r"ELF|DT_SONAME"):
            with_soname(whole[:size], "libx.so")


def test_a_name_that_is_too_long_is_refused() -> None:
    python = Path(sys.executable).resolve().read_bytes()
    with pytest.raises(OSError, match=r"longer|DT_SONAME"):
        with_soname(python, "x" * 500)


class Pretend:
    """A library that is given thread counts, and a clock that runs as they say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float]) -> None:
        self.seconds, self.threads, self.now = seconds, 1, 0.0
        monkeypatch.setattr("time.perf_counter", lambda: self.now)

    def set_threads(self, threads: int) -> None:
        self.threads = threads

    def run(self) -> None:
        self.now += self.seconds[self.threads]


@pytest.mark.parametrize(("seconds", "best"), [({1: 3.0, 4: 1.0}, 4), ({1: 1.0, 4: 50.0}, 1)])
def test_the_faster_number_of_threads_is_used(
    seconds: dict[int, float], best: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Pretend(monkeypatch, seconds)
    assert faster_threads(library.set_threads, 4, library.run) == best


@needs_openblas
def test_the_users_number_of_threads_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    assert thread_setter() is None
