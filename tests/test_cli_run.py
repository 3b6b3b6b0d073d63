"""`uma run` as a person or a script calls it: real models, real processes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from models import CHAT_TEMPLATE, saved_model

pytest.importorskip("mlx.core", reason="runs models")

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "full"
    saved_model("full", folder)
    return folder


def environment(home: Path, **more: str) -> dict[str, str]:
    own = {
        "UMA_CACHE_DIR": str(home / "cache"),
        "UMA_STATE_DIR": str(home / "state"),
        "UMA_CONFIG_DIR": str(home / "config"),
        "HF_HOME": str(home / "hf"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
    }
    return os.environ | own | more


def uma(
    home: Path, *arguments: object, stdin: str | None = "", **more: str
) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "uma", "run", *map(str, arguments)]
    return subprocess.run(
        command,
        input=stdin,
        capture_output=True,
        text=True,
        env=environment(home, **more),
        timeout=120,
    )


def document(done: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_answer_is_on_stdout_and_the_ledger_on_stderr(home: Path, model: Path) -> None:
    done = uma(home, model, "Hello", "--max-tokens", 5)
    assert done.returncode == 0, done.stderr
    assert "weights" not in done.stdout
    assert "weights" in done.stderr
    assert "peak" in done.stderr
    assert "cut after 5 tokens" in done.stderr


def test_the_line_before_a_run_and_the_table_tell_the_same_peak(home: Path, model: Path) -> None:
    same = ("--context", 512, "--dequantize", "never")
    line = uma(home, model, "Hello", "--max-tokens", 2, *same).stderr.splitlines()[0]
    table = uma(home, model, "--dry-run", *same).stdout
    peak = re.search(r"^peak +\w+ +([\d.]+ \w+)", table, re.MULTILINE)
    assert peak is not None
    assert f"peak {peak[1]} of" in line


def test_quiet_says_nothing_but_the_answer(home: Path, model: Path) -> None:
    assert uma(home, model, "Hello", "--max-tokens", 5, "--quiet").stderr == ""


def test_the_json_document_has_the_contracts_names(home: Path, model: Path) -> None:
    found = document(uma(home, model, "Hello", "--max-tokens", 4, "--json"))
    names = "text prompt_tokens generation_tokens prompt_tps generation_tps ttft_s load_s model"
    assert set(f"{names} machine settings ledger schema_version".split()) <= found.keys()
    assert found["generation_tokens"] == 4
    ledger = found["ledger"]
    assert set(ledger) == {
        "terms",
        "predicted_peak_bytes",
        "measured_peak_bytes",
        "budget_bytes",
        "limit_bytes",
        "verdict",
    }
    assert set(ledger["terms"][0]) == {
        "name",
        "predicted_bytes",
        "measured_bytes",
        "basis",
        "source",
        "phase",
    }


def test_exact_terms_are_measured_to_the_byte(home: Path, model: Path) -> None:
    found = document(uma(home, model, "word " * 300, "--max-tokens", 4, "--json"))
    exact = [t for t in found["ledger"]["terms"] if t["basis"] == "exact"]
    assert [t["name"] for t in exact] == ["weights", "kv_cache", "kv_cache"]
    assert [t["predicted_bytes"] for t in exact] == [t["measured_bytes"] for t in exact]


def test_a_dry_run_and_the_run_itself_plan_the_same(home: Path, model: Path) -> None:
    same = ("--context", 512, "--dequantize", "never", "--json")
    dry = document(uma(home, model, "--dry-run", *same))
    real = document(uma(home, model, "Hello", "--max-tokens", 2, *same))
    assert dry["settings"].items() <= real["settings"].items()
    assert dry["ledger"]["verdict"] == real["ledger"]["verdict"]


def test_the_context_is_a_hard_bound(home: Path, model: Path) -> None:
    found = document(uma(home, model, "Hello", "--context", 64, "--json"))
    assert found["finish_reason"] in ("context", "stop")
    assert found["prompt_tokens"] + found["generation_tokens"] <= 64


def test_a_prompt_longer_than_the_context_is_refused(home: Path, model: Path) -> None:
    done = uma(home, model, "word " * 200, "--context", 64)
    assert done.returncode == 2
    assert "leaves no room in a context of 64" in done.stderr


def test_the_prompt_comes_from_a_pipe(home: Path, model: Path) -> None:
    piped = uma(home, model, "--max-tokens", 3, "--json", stdin="Hello")
    given = uma(home, model, "Hello", "--max-tokens", 3, "--json")
    dashed = uma(home, model, "--prompt", "-", "--max-tokens", 3, "--json", stdin="Hello")
    texts = [document(done)["text"] for done in (piped, given, dashed)]
    assert len(set(texts)) == 1


def test_an_empty_prompt_is_refused_before_anything_is_loaded(home: Path, model: Path) -> None:
    done = uma(home, model, stdin="\n")
    assert (done.returncode, done.stdout) == (2, "")
    assert "the prompt is empty" in done.stderr


def test_a_saved_prompt_is_reused_and_says_how_much(
    home: Path, model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "prompt.safetensors"
    arguments = (model, "word " * 100, "--max-tokens", 4, "--prompt-cache", file, "--json")
    first = document(uma(home, *arguments))
    second = document(uma(home, *arguments))
    assert first["reused_tokens"] == 0
    assert second["reused_tokens"] >= 100
    assert second["text"] == first["text"]


def test_terms_of_a_reused_prompt_are_bounds_that_hold(
    home: Path, model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "prompt"
    # The file holds 300 slots, to which 300 more tokens add 512: from nothing it would be 768.
    for prompt in ("word " * 100, "word " * 600, "word " * 120):
        arguments = (model, prompt, "--max-tokens", 4, "--prompt-cache", file, "--json")
        found = document(uma(home, *arguments))
        ledger = found["ledger"]
        caches = [t for t in ledger["terms"] if t["name"] == "kv_cache"]
        for term in caches:
            assert (term["basis"] == "bound") == (found["reused_tokens"] > 0)
            assert term["measured_bytes"] <= term["predicted_bytes"]
            if term["basis"] == "exact":
                assert term["measured_bytes"] == term["predicted_bytes"]
        assert ledger["measured_peak_bytes"] <= ledger["predicted_peak_bytes"]
    assert found["reused_tokens"] > 100


@pytest.mark.parametrize("name", ["file/prompt", "n" * 300])
def test_a_prompt_cache_that_cannot_be_written_is_refused_before_the_answer(
    home: Path, model: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "file").write_text("a file")
    done = uma(home, model, "Hi", "--max-tokens", 2, "--prompt-cache", tmp_path / name)
    assert (done.returncode, done.stdout) == (1, "")
    assert "cannot be written" in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_leaves_the_saved_prompt_as_it_was(home: Path, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt"
    cached = (str(model), "--prompt-cache", str(file))
    assert uma(home, *cached, "word " * 100, "--max-tokens", 4).returncode == 0
    before = file.read_bytes()
    command = [sys.executable, "-m", "uma", "run", *cached, "Hi", "--context", "4000"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment(home)
    )
    assert process.stdout is not None
    process.stdout.read(1)  # the answer has begun
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert file.read_bytes() == before


def test_fewer_bits_are_quantized_on_load(home: Path, model: Path) -> None:
    found = document(
        uma(home, model, "Hi", "--bits", 4, "--max-tokens", 2, "--dequantize", "never", "--json")
    )
    assert found["settings"]["form"] == "affine 4/64"
    weights = found["ledger"]["terms"][0]
    assert weights["predicted_bytes"] == weights["measured_bytes"]


def test_what_exceeds_the_budget_is_refused_with_what_would_fit(home: Path, model: Path) -> None:
    done = uma(home, model, "Hi", "--budget", "3MiB", "--context", 4096)
    assert (done.returncode, done.stdout) == (3, "")
    assert "your budget is 3.0 MiB" in done.stderr
    assert "--context" in done.stderr
    assert "--force" in done.stderr


def test_the_advised_context_passes_our_own_check(home: Path, model: Path) -> None:
    done = uma(home, model, "--dry-run", "--budget", "3MiB", "--context", 4096)
    advised = next(w for w in done.stderr.split("--context ")[1].split())
    again = uma(home, model, "--dry-run", "--budget", "3MiB", "--context", advised)
    assert (done.returncode, again.returncode) == (3, 0), again.stderr


def test_forced_it_runs_all_the_same(home: Path, model: Path) -> None:
    done = uma(home, model, "Hi", "--budget", "1MiB", "--force", "--max-tokens", 2)
    assert done.returncode == 0
    assert "going on" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["/no/such/model", "Hi"], 1, "no such file or folder"),
        (["lama-3-70b", "Hi"], 2, "llama-3-70b"),
        (["--budget", "24", "Hi"], 2, "24GiB"),
        (["--bits", "7", "llama-3-8b", "Hi"], 2, "7"),
        (["--no-such-option"], 2, "no-such-option"),
        (["--temp", "-1", "x", "y"], 2, "temp"),
        (["llama-3-8b", "Hi", "--stop", ""], 2, "--stop is empty"),
    ],
)
def test_a_wrong_argument_gives_one_clear_line(
    home: Path, arguments: list[str], code: int, text: str
) -> None:
    done = uma(home, *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_an_uncached_repository_without_network_says_what_was_tried(home: Path) -> None:
    done = uma(home, "mlx-community/Meta-Llama-3-8B-Instruct-4bit", "Hi", "--budget", "100GiB")
    assert done.returncode in (1, 3)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "form"),
    [
        (["llama-3-8b"], "affine 4/64"),
        (["llama-3-8b", "--quant", "8bit"], "affine 8/64"),
        (["llama-3-8b", "--quant", "mxfp4"], "mxfp4 4/32"),
        (["llama-3-8b", "--bits", "16"], "bfloat16"),
        (["llama3:8b-q8_0"], "affine 8/64"),
    ],
)
def test_the_asked_format_is_the_planned_one(home: Path, arguments: list[str], form: str) -> None:
    done = uma(home, *arguments, "--dry-run", "--force", "--json", "--dequantize", "never")
    assert json.loads(done.stdout)["settings"]["form"] == form


def test_a_dry_run_checks_the_draft_model_and_the_adapter_too(home: Path, model: Path) -> None:
    drafted = document(uma(home, model, "--draft-model", model, "--dry-run", "--json"))
    assert "draft_weights" in {t["name"] for t in drafted["ledger"]["terms"]}
    done = uma(home, model, "--adapter-path", home / "none", "--dry-run")
    assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.parametrize("group_size", [0, 48, 96])
def test_a_cache_group_that_no_head_divides_is_refused_before_loading(
    home: Path, model: Path, group_size: int
) -> None:
    done = uma(home, model, "--kv-bits", 8, "--kv-group-size", group_size, "--dry-run")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--kv-group-size" in done.stderr


def test_a_setting_from_outside_gives_way_to_the_argument(home: Path, model: Path) -> None:
    done = uma(home, model, "Hi", "--max-tokens", 2, UMA_MODEL="llama-3-8b", UMA_STOP="END")
    assert done.returncode == 0, done.stderr


def test_llama_3_70b_is_planned_without_weights_or_network(home: Path) -> None:
    done = uma(home, "--model", "llama-3-70b", "--dry-run", "--json", "--force")
    weights = json.loads(done.stdout)["ledger"]["terms"][0]
    # exo's model card of the published 4-bit repository: storage_size.in_bytes
    assert weights["predicted_bytes"] == 39_688_355_840
    assert (weights["basis"], weights["source"]) == ("exact", "catalog shapes x affine 4/64")


def records(home: Path) -> list[Path]:
    return sorted((home / "state" / "records").glob("*.json"))


def test_a_record_is_kept_and_holds_no_text_of_the_user(home: Path, model: Path) -> None:
    prompt = "a-very-secret-prompt"
    assert uma(home, model, prompt, "--max-tokens", 3).returncode == 0
    newest = max(records(home), key=os.path.getmtime).read_text()
    assert json.loads(newest)["ledger"]["terms"]
    assert prompt not in newest
    assert str(model) not in newest


def test_no_record_keeps_none(home: Path, model: Path) -> None:
    folder = home / "state" / "records"
    before = len(list(folder.glob("*"))) if folder.exists() else 0
    assert uma(home, model, "Hi", "--max-tokens", 2, "--no-record").returncode == 0
    assert (len(list(folder.glob("*"))) if folder.exists() else 0) == before


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text('Hello\n{"prompt": "word word word"}\n"Hi \\ud800"\n')
    return file


def test_many_prompts_are_answered_in_order_and_pages_are_compared(
    home: Path, model: Path, prompts: Path
) -> None:
    done = uma(home, model, "--prompts", prompts, "--max-tokens", 3)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3
    assert "kv_cache" in done.stderr
    assert "in pages of 16 tokens" in done.stderr


def test_a_batch_is_planned_and_measured_and_recorded_as_one(
    home: Path, model: Path, prompts: Path
) -> None:
    before = set(records(home))
    found = document(uma(home, model, "--prompts", prompts, "--max-tokens", 3, "--json"))
    names = "answers held_bytes paged_bytes prompt_tps model machine settings ledger process"
    assert set(f"{names} schema_version".split()) <= found.keys()
    assert found["settings"]["batch_size"] == 3
    assert [a["generation_tokens"] for a in found["answers"]] == [3, 3, 3]
    ledger = found["ledger"]
    assert ledger["measured_peak_bytes"] <= ledger["predicted_peak_bytes"]
    (record,) = set(records(home)) - before
    assert json.loads(record.read_text())["settings"]["batch_size"] == 3


@pytest.mark.parametrize(
    "beside",
    [("Hello",), ("--draft-model", "x"), ("--prompt-cache", "x"), ("--kv-bits", 8)],
)
def test_what_a_batch_would_ignore_is_refused(
    home: Path, model: Path, prompts: Path, beside: tuple[object, ...]
) -> None:
    done = uma(home, model, *beside, "--prompts", prompts)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--prompts does not go with" in done.stderr


def test_bytes_that_are_no_text_do_not_stop_a_run(home: Path, model: Path) -> None:
    for arguments, piped in (
        ([], b"caf\xe9"),
        ([b"caf\xe9"], b""),
        ([b"Hi", b"--system", b"caf\xe9"], b""),
    ):
        command = [sys.executable, "-m", "uma", "run", str(model), "--max-tokens", "2"]
        done = subprocess.run(
            [*command, *arguments], input=piped, capture_output=True, env=environment(home)
        )
        assert done.returncode == 0, done.stderr


def test_the_memory_of_the_process_is_told_and_kept(home: Path, model: Path) -> None:
    shown = uma(home, model, "Hi", "--max-tokens", 2).stderr
    assert any(line.startswith("process: ") for line in shown.splitlines())
    before = set(records(home))
    process = document(uma(home, model, "Hi", "--max-tokens", 2, "--json"))["process"]
    assert process["peak_bytes"] >= process["current_bytes"] > 10_000_000
    (record,) = set(records(home)) - before
    kept = json.loads(record.read_text())["ledger"]["process"]
    assert kept["peak_bytes"] == process["peak_bytes"]


def test_notes_on_the_machine_are_shown(home: Path, model: Path) -> None:
    code = (
        "import sys, dataclasses, uma.cli.session as s; real = s.live_machine; "
        "s.live_machine = lambda: dataclasses.replace(real(), notes=('limit raised by hand',)); "
        f"from uma.cli import main; sys.exit(main(['run', {str(model)!r}, 'Hi', '--max-tokens=2']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(home)
    )
    assert done.returncode == 0, done.stderr
    assert "note: limit raised by hand" in done.stderr


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template begins each answer inside a thinking block."""
    folder = saved_model("full", tmp_path_factory.mktemp("models") / "thinker")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE + "<think>")
    return folder


def test_thinking_is_told_from_the_answer(home: Path, thinker: Path) -> None:
    shown = uma(home, thinker, "Hi", "--max-tokens", 5)
    found = document(uma(home, thinker, "Hi", "--max-tokens", 5, "--json"))
    hidden = document(uma(home, thinker, "Hi", "--max-tokens", 5, "--json", "--thinking", "hide"))
    assert found["text"] == hidden["text"] == ""
    assert found["thinking"]
    assert hidden["thinking"] == ""
    assert shown.stdout.strip() == ""
    assert found["thinking"] in shown.stderr


def test_the_prompts_may_come_from_a_pipe(home: Path, model: Path) -> None:
    done = uma(home, model, "--prompts", "/dev/stdin", "--max-tokens", 2, stdin="Hello\nHi\n")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2


def test_ctrl_c_ends_the_answer_with_130_and_leaves_the_lock(home: Path, model: Path) -> None:
    command = [sys.executable, "-m", "uma", "run", str(model), "Hi", "--context", "4000"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        env=environment(home),
    )
    assert process.stdout is not None
    process.stdout.read(1)  # the answer has begun
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert b"Traceback" not in errors
    assert uma(home, model, "Hi", "--max-tokens", 2).returncode == 0


def test_output_survives_a_narrow_console(home: Path, model: Path) -> None:
    done = uma(home, model, "Hi", "--max-tokens", 8, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr


def test_a_reader_that_leaves_ends_the_run_quietly(home: Path, model: Path) -> None:
    command = [sys.executable, "-m", "uma", "run", str(model), "Hi", "--context", "4000", "-q"]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(home),
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_the_server_command_names_the_planned_limits(home: Path, model: Path) -> None:
    done = uma(
        home,
        model,
        "--context",
        2048,
        "--emit",
        "mlx_lm.server",
        "--kv-bits",
        8,
        "--kv-group-size",
        32,
    )
    command = done.stdout.splitlines()[-1].split()
    assert command[:3] == ["mlx_lm.server", "--model", str(model)]
    assert command[command.index("--kv-bits") + 1] == "8"
