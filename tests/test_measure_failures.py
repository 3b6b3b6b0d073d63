"""What Metal, MLX, llama.cpp, PyTorch and the kernel print, as people posted it."""

import re

import pytest

from uma.catalog.observed import failures
from uma.cli.app import command
from uma.cli.commands import COMMANDS
from uma.measurement.failures import explain
from uma.units import GIB

METAL = "[METAL] Command buffer execution failed: "
ABORT = "libc++abi: terminating due to uncaught exception of type std::runtime_error: "

# case of the case list, what was printed and where, the cause
POSTED = [
    (
        "B3",  # ml-explore/mlx pull request 479
        f"{ABORT}{METAL}Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
        "out_of_memory",
    ),
    (
        "B3",  # mlx, backend/metal/allocator.cpp
        "RuntimeError: [metal::malloc] Attempting to allocate 28991029248 bytes which is greater "
        "than the maximum allowed buffer size of 22613000192 bytes.",
        "single_buffer",
    ),
    (
        "B3",  # ggml-org/llama.cpp issue 1815
        "ggml_metal_add_buffer: buffer 'data' size 18300780544 is larger than buffer maximum of "
        "17179869184",
        "single_buffer",
    ),
    ("B3", "[malloc_or_wait] Unable to allocate 2147483648 bytes.", "out_of_memory"),
    (
        "B3",  # ggml-org/llama.cpp issue 9112
        "ggml_metal_graph_compute: command buffer 3 failed with status 5\nerror: Insufficient "
        "Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
        "out_of_memory",
    ),
    (
        "B3",  # pytorch/pytorch issue 105839
        "RuntimeError: MPS backend out of memory (MPS allocated: 1.45 GB, other allocations: "
        "7.42 GB, max allowed: 9.07 GB). Tried to allocate 563.62 MB on private pool.",
        "out_of_memory",
    ),
    (
        "B3",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "out_of_memory",
    ),
    (
        "B4",  # mlx-swift issue 458: the same failure, but the program is gone
        f"{ABORT}{METAL}Insufficient Memory "
        "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)\nzsh: abort      python a.py",
        "out_of_memory",
    ),
    ("B4", "zsh: killed     python train.py", "killed"),
    ("B4", "bash: line 1:  4242 Killed                  python train.py", "killed"),
    ("B4", "make: *** [train] Killed: 9", "killed"),
    ("B4", "Out of memory: Killed process 3158 (python) total-vm:26214400kB", "killed"),
    ("B5", "RuntimeError: [metal::malloc] Resource limit (499000) exceeded.", "resource_count"),
    (
        "B6",
        '  File "trainer.py", line 300, in step\nRuntimeError: [metal::malloc] Resource limit '
        "(499000) exceeded.\n",
        "resource_count",
    ),
    (
        "B7",  # jundot/omlx issue 1387, with the space that it was posted with
        f"{METAL}Impacting Interactivity (0000000e: "
        "kIOGPUCommandBufferCallbackErrorImpactingInteractivity)",
        "interactivity",
    ),
    (
        "B8",  # ml-explore/mlx-lm issue 1572
        f"{ABORT}\n{METAL}Caused GPU Timeout Error\n"
        "(00000002:kIOGPUCommandBufferCallbackErrorTimeout).",
        "timeout",
    ),
    (
        "I1",  # ml-explore/mlx issue 3346
        'panic(cpu 23 caller 0xfffffe004b8cd288): "completeMemory() prepare count underflow" '
        "@IOGPUMemory.cpp:550",
        "system_panic",
    ),
    (
        "I1",  # jundot/omlx issue 3065
        "panic: watchdog timeout: no checkins from watchdogd in 93 seconds",
        "system_watchdog",
    ),
    (
        "I2",  # mlx, backend/metal/allocator.cpp
        "ValueError: [metal::set_wired_limit] Setting a wired limit larger than the maximum "
        "working set size is not allowed.",
        "wired_limit",
    ),
    (
        "I3",  # flutter/flutter issue 155538
        "Execution of the command buffer was aborted due to an error during execution. Discarded "
        "(victim of GPU error/recovery) (00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim)",
        "victim",
    ),
    (
        "I4",  # the same
        "Ignored (for causing prior/excessive GPU errors) "
        "(00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)",
        "blocked",
    ),
    (
        "I4",  # flutter/flutter issue 153574
        "Caused GPU Hang Error (00000003:kIOGPUCommandBufferCallbackErrorHang)",
        "gpu_hang",
    ),
    (
        "I4",  # flutter/flutter issue 155538
        "Caused GPU Address Fault Error (0000000b:kIOGPUCommandBufferCallbackErrorPageFault)",
        "gpu_fault",
    ),
    ("I6", "[metal::Device] Unable to construct residency set.", "residency"),
]


@pytest.mark.parametrize(("case", "text", "cause"), POSTED)
def test_a_posted_failure_has_one_cause_and_one_remedy(case: str, text: str, cause: str) -> None:
    found = explain(f"some line before\n{text}\nsome line after")
    assert found is not None, case
    assert found.cause == cause
    assert found.remedy
    assert found.quote in text
    assert found.source


def test_interactivity_and_a_count_of_buffers_are_never_called_a_lack_of_memory() -> None:
    for cause in ("interactivity", "resource_count", "single_buffer", "gpu_fault"):
        (row,) = [row for row in failures() if row.cause == cause]
        assert "ran out of memory" not in row.text
        assert "smaller model" not in row.remedy


def test_a_timeout_while_swap_grew_is_a_lack_of_memory() -> None:
    text = f"{METAL}Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)"
    swapped, calm = explain(text, swap_growth_bytes=2 * GIB), explain(text, swap_growth_bytes=0)
    assert swapped is not None
    assert calm is not None
    assert (swapped.cause, calm.cause) == ("memory_pressure", "timeout")
    assert "2.00 GiB" in swapped.text
    other = explain(f"{METAL}Impacting Interactivity", swap_growth_bytes=2 * GIB)
    assert other is not None
    assert other.cause == "interactivity"


def test_an_aborted_process_is_told_that_newer_versions_raise_instead() -> None:
    aborted = explain(f"{ABORT}{METAL}Insufficient Memory (00000008:kIOGPU...)")
    raised = explain(f"RuntimeError: {METAL}Insufficient Memory (00000008:kIOGPU...)")
    assert aborted is not None
    assert raised is not None
    assert "3523" in aborted.notes[0]
    assert raised.notes == ()


def test_the_first_cause_is_told_where_a_log_has_several() -> None:
    ignored = "Ignored (for causing prior/excessive GPU errors) (00000004:kIOGPU...)"
    hang = "Caused GPU Hang Error (00000003:kIOGPUCommandBufferCallbackErrorHang)"
    found = explain(f"{hang}\n{ignored}\n{ignored}")
    assert found is not None
    assert found.cause == "gpu_hang"


@pytest.mark.parametrize(
    "text",
    ["", "Traceback (most recent call last):\nKeyError: 'a'", "the task was Killed softly by code"],
)
def test_any_other_text_is_not_explained(text: str) -> None:
    assert explain(text) is None


@pytest.mark.parametrize(
    "piece", ["ggml_metal_x alloc_buffer: ", "ggml_", "sh: ", "greater than ", "\n", "\0"]
)
def test_a_long_log_is_read_at_once(piece: str) -> None:
    import time

    log = piece * (1_000_000 // len(piece))
    began = time.process_time()
    assert explain(log) is None
    assert time.process_time() - began < 2


def test_every_command_and_option_that_a_remedy_names_is_there() -> None:
    named = [
        (name, options.split())
        for row in failures()
        for name, options in re.findall(r"\buma ([a-z]+)((?: --[a-z-]+)*)", row.remedy)
    ]
    assert {"run", "estimate", "measure", "compare"} <= {name for name, _ in named}
    assert "--no-wire" in dict(named)["run"]
    for name, options in named:
        assert name in COMMANDS
        known = {option for parameter in command(name).params for option in parameter.opts}
        assert set(options) <= known


def test_every_row_of_the_table_is_a_cause_with_a_source_and_a_pattern_that_some_text_matches() -> (
    None
):
    texts = "\n".join(text for _, text, _ in POSTED)
    texts += "\nNo Metal device available\nfailed to allocate buffer, size = 5 MiB\n"
    texts += "filesystem error: temp_directory_path: No such file or directory\n"
    for row in failures():
        assert re.fullmatch(r"[a-z_]+", row.cause)
        assert row.source
        assert re.search(row.pattern, texts), row
        for sentence in (row.text, row.remedy):
            assert sentence[0].isupper() or sentence.startswith(("mlx", "llama.cpp")), row
            assert sentence.endswith(".")
