"""A folder of a model with one thing wrong in it: one clear line, before its weights are read."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from models import saved_model
from test_cli_run import environment, uma

pytest.importorskip("mlx.core", reason="runs models")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model("full", tmp_path_factory.mktemp("models") / "full")


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "copy"))


def change(path: Path, **values: Any) -> None:
    old = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(old | values))


def refused(done: "subprocess.CompletedProcess[str]", words: str) -> None:
    *_, last = done.stderr.strip().splitlines()
    assert done.returncode == 1
    assert last.startswith("uma: ")
    assert words in last
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "values",
    [
        {"quantization": {"group_size": 0, "bits": 4}},
        {"quantization": {"group_size": 64, "bits": 0}},
        {"quantization": {"group_size": 64, "bits": 4, "mode": "best"}},
        {"quantization": "four bits"},
        {"max_position_embeddings": "many"},
        {"max_position_embeddings": -7},
        {"rope_theta": "abc"},
        {"rms_norm_eps": float("nan")},
    ],
    ids=str,
)
def test_a_config_with_a_number_that_is_none(
    values: dict[str, Any], copy: Path, tmp_path: Path
) -> None:
    change(copy / "config.json", **values)
    refused(uma(tmp_path, copy, "--prompt", "hi"), "config.json has")


def test_what_is_wrong_beside_the_weights_is_found_before_they_are_read(
    copy: Path, tmp_path: Path
) -> None:
    weights = copy / "model.safetensors"
    body = bytearray(weights.read_bytes())
    del body[len(body) // 2 :]  # reading them would fail with another message
    (tokenizer := copy / "tokenizer.json").rename(hidden := copy / "hidden")
    weights.write_bytes(body + bytes(weights.stat().st_size - len(body)))
    refused(uma(tmp_path, copy, "--prompt", "hi"), "tokenizer.json")
    hidden.rename(tokenizer)
    change(copy / "generation_config.json", temperature=float("nan"), do_sample=True)
    refused(uma(tmp_path, copy, "--prompt", "hi"), "generation_config.json")
    (copy / "generation_config.json").unlink()
    (copy / "chat_template.jinja").write_text("{{ raise_exception('\x1b[31mno\nway') }}")
    refused(uma(tmp_path, copy, "--prompt", "hi"), "TemplateError: \\x1b[31mno way")


def test_a_template_that_writes_half_a_character(copy: Path, tmp_path: Path) -> None:
    (copy / "chat_template.jinja").write_text("{{ '\\ud800' }}{{ messages[0].content }}")
    done = uma(tmp_path, copy, "--prompt", "hi", "--max-tokens", 2)
    assert done.returncode == 0, done.stderr


def test_a_tokenizer_that_wants_to_run_its_own_code(copy: Path, tmp_path: Path) -> None:
    change(copy / "tokenizer_config.json", auto_map={"AutoTokenizer": ["own.Own", None]})
    change(copy / "tokenizer_config.json", tokenizer_class="Own")
    refused(uma(tmp_path, copy, "--prompt", "hi"), "is not run")


def test_a_program_started_without_stdin(model: Path, tmp_path: Path) -> None:
    command = f"exec {sys.executable} -m uma run {model} --prompt - <&-"
    done = subprocess.run(
        ["sh", "-c", command], env=environment(tmp_path), capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (
        2,
        "uma: the prompt is empty; give one with --prompt, or pipe it in\n",
    )


@pytest.mark.parametrize("stderr", ["2>&-", "2>/dev/full"])
def test_the_answer_comes_without_a_stderr(stderr: str, model: Path, tmp_path: Path) -> None:
    options = "--max-tokens 2 --no-record"
    command = f"exec {sys.executable} -m uma run {model} --prompt hi {options} {stderr}"
    done = subprocess.run(
        ["sh", "-c", command], env=environment(tmp_path), stdout=subprocess.PIPE, text=True
    )
    assert done.returncode == 0
    assert "weights" not in done.stdout


@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("g++") is None, reason="MLX compiles nothing there"
)
def test_a_folder_in_which_nothing_can_be_compiled_is_named(model: Path, tmp_path: Path) -> None:
    nowhere = str(tmp_path / "none such")
    done = uma(tmp_path, model, "--prompt", "hi", "--max-tokens", 2, TMPDIR=nowhere)
    assert done.returncode == 1
    assert "do: Set TMPDIR to a folder" in done.stderr
    assert "Traceback" not in done.stderr


LONG_EVALUATION = """
import mlx.core as mx
from uma.runtime.interrupt import interruptible
a = mx.random.normal((4000, 4000))
mx.eval(a)
with interruptible():
    print("ready", flush=True)
    b = a
    for _ in range(400):
        b = b @ a
    mx.eval(b)
"""


def test_a_second_ctrl_c_ends_an_evaluation_that_python_cannot_interrupt(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LONG_EVALUATION],
        stdout=subprocess.PIPE,
        env=environment(tmp_path),
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(1)
    for _ in range(2):
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.2)
    assert process.wait(timeout=20) == 130
    process.stdout.close()
