"""Training in a child process: what its end means, what the parent says, how it goes on."""

import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from models import saved_model

from uma.cli import main
from uma.measurement.run_folder import checkpoints, events, is_held
from uma.measurement.run_status import read_status
from uma.runtime.lora import supervise
from uma.runtime.lora.supervise import awake_command, cause_of, run_child

ROOT = Path(__file__).parents[1]
IGNORED = (signal.SIGHUP, signal.SIGINT)
METAL = (
    "libc++abi: terminating due to uncaught exception of type std::runtime_error: [METAL] Command "
    "buffer execution failed: {}"
)
ENDS = {
    "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)": "out_of_memory",
    "Impacting Interactivity (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)": (
        "interactivity"
    ),
    "Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)": "timeout",
}


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.mark.parametrize("text", ENDS)
def test_an_abort_of_metal_is_told_by_its_cause(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With plain mlx_lm the process is gone, and nobody is left to say why (cases B4, B7)."""
    said = METAL.format(text)
    code = f"import os, sys; sys.stderr.write({said!r}); sys.stderr.flush(); os.abort()"
    ended = run_child(python(code), allow_sleep=True)
    assert ended.code == -signal.SIGABRT
    cause = cause_of(ended)
    assert cause is not None
    assert cause.cause == ENDS[text]
    assert cause.smaller_helps
    assert said in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="MLX's CPU backend")
def test_memory_that_mlx_does_not_get_is_told_by_its_cause() -> None:
    """On the CPU MLX 0.32.4 does not look whether it got the memory, and touches it."""
    code = (
        "import mlx.core as mx, resource\n"
        "resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))\n"
        "mx.eval(mx.zeros((1 << 16, 1 << 16)) + 1)"
    )
    cause = cause_of(run_child(python(code), allow_sleep=True))
    assert cause is not None
    assert "no more memory" in cause.text or cause.cause == "out_of_memory"
    assert cause.smaller_helps


def test_memory_that_blas_does_not_get_is_a_lack_of_memory_although_it_exits_by_itself() -> None:
    """Seen under ``ulimit -v 600000``; the code is 1, as of an error of ours."""
    said = "OpenBLAS error: Memory allocation still failed after 10 retries, giving up."
    cause = cause_of(run_child(python(f"import sys; sys.exit({said!r})"), allow_sleep=True))
    assert cause is not None
    assert (cause.cause, cause.smaller_helps) == ("out_of_memory", True)


def test_a_child_that_ends_by_itself_has_no_cause_and_its_output_is_kept() -> None:
    for code in (0, 1, 2, 3, 130):
        ended = run_child(python(f"import sys; print({code}); sys.exit({code})"), allow_sleep=True)
        assert (ended.code, ended.output) == (code, f"{code}\n")
        assert cause_of(ended) is None


def test_a_mac_is_kept_awake_without_keeping_its_display_on() -> None:
    assert awake_command(7) == ["caffeinate", "-is", "-w", "7"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model("full", tmp_path_factory.mktemp("base") / "model")


@pytest.fixture
def run(base: Path, tmp_path: Path) -> "Run":
    data = tmp_path / "data"
    data.mkdir()
    rows = [{"prompt": f"What is {n}?", "completion": f"The number {n}."} for n in range(12)]
    for name, part in (("train", rows[4:]), ("valid", rows[:4])):
        (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return Run(base, tmp_path)


class Run:
    """``uma lora train`` as a process of its own, and its folder."""

    def __init__(self, base: Path, home: Path) -> None:
        self.base, self.home, self.folder = base, home, home / "run"
        self.environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
            "UMA_STATE_DIR": str(home / "state"),
        }

    def arguments(self, *more: str) -> list[str]:
        return [
            *("lora", "train", str(self.base), "--data", str(self.home / "data")),
            *("--adapter-path", str(self.folder), "--num-layers", "2", "--batch-size", "4"),
            *("--save-every", "5", "--steps-per-report", "1", "--steps-per-eval", "50"),
            *("--dropout", "0.1", "--val-batches", "1", "--allow-concurrent", *more),
        ]

    def start(self, *more: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "uma", *self.arguments(*more)],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def uma(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "uma", *arguments]
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False, timeout=120
        )

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            self.uma("lora", "status", str(self.folder), "--json").stdout
        )
        return found

    def wait_for(self, iteration: int, begins: int = 1) -> None:
        """Until a checkpoint at or after ``iteration`` is kept."""
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            log = events(self.folder)
            begun = sum(e["event"] == "begin" for e in log) >= begins
            kept = [e["iteration"] for e in log if e["event"] == "checkpoint"]
            if begun and kept and kept[-1] >= iteration:
                return
            time.sleep(0.05)
        raise AssertionError(f"not at iteration {iteration} in time: {events(self.folder)[-3:]}")


def test_a_killed_child_is_told_with_what_is_left_and_the_command_that_goes_on(run: Run) -> None:
    parent = run.start("--iters", "4000")
    run.wait_for(5)
    status = run.status()
    assert status["state"] == "running"
    assert status["iteration"] >= 5
    assert status["iters"] == 4000
    assert status["left_s"] > 0
    assert status["memory_bytes"] > 0
    os.kill(status["pid"], signal.SIGKILL)
    _, errors = parent.communicate(timeout=60)
    assert parent.returncode == 1
    told = errors[errors.index("uma: training ended after iteration") :]
    assert "memory ran out" in told
    assert "last memory line: " in told
    assert "The process held " in told
    assert "do: Give --micro-batch 2 (--auto-resume goes on with that by itself)" in told
    kept = int(checkpoints(run.folder)[-1].name)
    assert f"kept: the checkpoint of iteration {kept}, the adapter in {run.folder}" in told
    ended = run.status()
    assert ended["state"] == "killed"
    assert ended["checkpoint_iteration"] == kept
    assert ended["command"] in told
    iters = str(kept + 5)
    command = ["lora", *shlex.split(ended["command"])[2:]]
    command[command.index("--iters") + 1] = iters
    done = json.loads(run.uma(*command, "--json").stdout)
    assert done["iters"] == kept + 5
    assert not any("not bit for bit" in note for note in done["notes"])
    assert run.status()["state"] == "done"
    assert run.uma("lora", "status").stdout.startswith(f"{run.folder}: done, iteration {iters}")


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="Linux")
def test_a_disk_that_is_full_is_one_clear_line_and_nothing_saved_is_lost(run: Run) -> None:
    """As on a full disk, no file takes more than the log has already."""
    parent = run.start("--iters", "4000")
    run.wait_for(5)
    size = (run.folder / "log.jsonl").stat().st_size
    resource.prlimit(run.status()["pid"], resource.RLIMIT_FSIZE, (size, size))
    _, errors = parent.communicate(timeout=60)
    assert parent.returncode == 1
    line, kept_line, again = errors.splitlines()[-3:]
    assert line.startswith("uma: ")
    assert "cannot be written" in line
    status = read_status(run.folder)
    assert kept_line.startswith(f"  kept: the checkpoint of iteration {status.checkpoint}, ")
    assert again == f"  continue: {status.command}"
    assert status.checkpoint is not None
    assert status.checkpoint >= 5
    kept = status.checkpoint + 5
    done = run.uma(*run.arguments("--iters", str(kept), "--resume", "--json"))
    assert json.loads(done.stdout)["iters"] == kept


def test_auto_resume_goes_on_from_the_checkpoint_with_half_the_rows_at_once(run: Run) -> None:
    parent = run.start("--iters", "4000", "--auto-resume")
    run.wait_for(5)
    os.kill(run.status()["pid"], signal.SIGKILL)
    run.wait_for(10, begins=2)
    parent.send_signal(signal.SIGINT)
    _, errors = parent.communicate(timeout=60)
    assert parent.returncode == 130
    assert "going on with 2 of the longest rows at once" in errors
    begins = [event for event in events(run.folder) if event["event"] == "begin"]
    assert [event["plan"]["micro_batch"] for event in begins] == [4, 2]
    assert begins[1]["iteration"] >= 5
    assert "pass_tokens" in errors  # in the note that it is not bit for bit the unbroken run


DYING = """
import os, signal, sys
from pathlib import Path
home = Path(os.environ["DYING"])
def die(*_):
    with (home / "died").open("a") as file:
        file.write("died\\n")
    sys.stderr.write({said!r})
    sys.stderr.flush()
    os.abort()
if "UMA_TRAINING_PARENT" in os.environ and (home / "at once").exists():
    die()
if "UMA_TRAINING_PARENT" in os.environ and (home / "when asked to leave").exists():
    take, signal.signal = signal.signal, lambda number, handler: handler
    take(signal.SIGTERM, die)
"""
"""A ``sitecustomize.py``: MLX's abort on Metal, as it was posted, in each child."""


@pytest.fixture
def dying(run: Run) -> Run:
    site = run.home / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(DYING.format(said=METAL.format(next(iter(ENDS)))))
    run.environment["PYTHONPATH"] += os.pathsep + str(site)
    run.environment["DYING"] = str(run.home)
    return run


def test_a_child_that_dies_at_once_each_time_is_tried_with_less_and_less_and_then_no_more(
    dying: Run,
) -> None:
    parent = dying.start("--iters", "4000", "--auto-resume")
    dying.wait_for(5)
    (dying.home / "at once").touch()
    os.kill(dying.status()["pid"], signal.SIGKILL)
    _, errors = parent.communicate(timeout=60)
    assert parent.returncode == 1
    assert (dying.home / "died").read_text() == "died\n" * 2  # with 2 rows and with 1
    assert "The GPU ran out of memory" in errors
    assert errors.splitlines()[-1] == "one row at once is the least: not tried again"
    status = dying.status()
    assert status["state"] == "killed"
    assert status["checkpoint_iteration"] >= 5
    assert status["command"]


def test_a_child_that_dies_while_it_is_asked_to_leave_is_not_begun_again(dying: Run) -> None:
    (dying.home / "when asked to leave").touch()
    parent = dying.start("--iters", "4000", "--auto-resume")
    dying.wait_for(5)
    parent.send_signal(signal.SIGINT)
    _, errors = parent.communicate(timeout=60)
    assert parent.returncode == 1
    assert (dying.home / "died").read_text() == "died\n"
    assert "The GPU ran out of memory" in errors
    assert "going on with" not in errors


def test_the_end_of_its_terminal_lets_a_run_save_and_leave(run: Run) -> None:
    parent = run.start("--iters", "4000")
    run.wait_for(5)
    parent.send_signal(signal.SIGHUP)
    output, _ = parent.communicate(timeout=60)
    assert parent.returncode == 130
    assert "--resume" in output
    status = read_status(run.folder)
    assert status.how == "stopped"
    assert status.checkpoint == status.iteration
    assert status.can_continue


def test_a_second_signal_leaves_at_once_and_the_run_says_so(run: Run) -> None:
    parent = run.start("--iters", "4000")
    run.wait_for(5)
    child = run.status()["pid"]
    os.kill(child, signal.SIGSTOP)  # so that both are there before it comes to a step's end
    parent.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    os.kill(child, signal.SIGINT)
    os.kill(child, signal.SIGCONT)
    _, errors = parent.communicate(timeout=60)
    assert parent.returncode == 130
    status = read_status(run.folder)
    assert (status.how, status.checkpoint) == ("failed", int(checkpoints(run.folder)[-1].name))
    assert "as a second signal asked" in status.text
    assert f"kept: the checkpoint of iteration {status.checkpoint}" in errors


def test_a_run_under_nohup_is_not_ended_by_the_end_of_its_terminal(run: Run) -> None:
    """A background job of a script ignores Ctrl-C in the same way."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in IGNORED}
    try:
        parent = run.start("--iters", "4000")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    run.wait_for(5)
    for pid in (parent.pid, run.status()["pid"]):
        for number in IGNORED:
            os.kill(pid, number)
    run.wait_for(events(run.folder)[-1]["iteration"] + 10)
    parent.terminate()
    _, errors = parent.communicate(timeout=60)
    assert parent.returncode == 130
    assert errors.count("saving after this step") == 1


def test_a_child_whose_parent_is_gone_saves_and_leaves(run: Run) -> None:
    parent = run.start("--iters", "4000")
    run.wait_for(5)
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 30
    while is_held(run.folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    status = read_status(run.folder)
    assert status.how == "abandoned"
    assert status.checkpoint == status.iteration


def test_a_detached_run_outlives_the_command_and_is_ended_by_a_signal(run: Run) -> None:
    done = run.uma(*run.arguments("--iters", "4000", "--detach", "--json"))
    assert done.returncode == 0
    document = json.loads(done.stdout)
    assert document["run"] == str(run.folder)
    pid = document["pid"]
    assert os.getsid(pid) == pid  # a session of its own: no terminal's end reaches it
    run.wait_for(5)
    assert read_status(run.folder).how == "running"
    second = run.uma(*run.arguments("--iters", "4000", "--resume"))
    assert second.returncode == 1
    assert "another process trains in" in second.stderr
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 30
    while is_held(run.folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    stopped = read_status(run.folder)
    assert stopped.how == "stopped"
    assert "--detach" in shlex.split(stopped.command or "")


def test_a_run_that_another_was_faster_than_says_nothing_of_that_one(
    run: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two are started at once: the other one begins while this one's child is on its way."""
    ours, other = supervise.run_child, []

    def late(*arguments: Any, **options: Any) -> Any:
        other.append(run.start("--iters", "4000"))
        run.wait_for(5)
        return ours(*arguments, **options)

    monkeypatch.setattr(supervise, "run_child", late)
    for name in ("PYTHONPATH", "UMA_STATE_DIR"):
        monkeypatch.setenv(name, run.environment[name])
    assert main(run.arguments("--iters", "4000")) == 1
    other[0].terminate()
    other[0].communicate(timeout=60)
    told = capfd.readouterr().err
    assert "another process trains in" in told
    assert "kept:" not in told


def test_a_detached_run_that_cannot_begin_says_so_at_once(run: Run) -> None:
    (run.home / "data" / "train.jsonl").write_text('{"txt": 1}\n')
    done = run.uma(*run.arguments("--detach"))
    assert done.returncode == 1
    assert "train.jsonl:1:1" in done.stderr
    for text in (
        run.uma("lora", "status").stdout,
        run.uma("lora", "status", str(run.folder)).stdout,
    ):
        assert text.startswith(f"{run.folder}: failed, iteration 0\n")
        assert "train.jsonl:1:1" in text
