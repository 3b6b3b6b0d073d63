"""The options of `uma estimate`: machines that are described, engines' own words, traces, pages."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paged_slots import simulated_holding
from safetensors.numpy import save_file

from uma.cli import main
from uma.cli.asked import OWN_OPTIONS
from uma.memory.paging import Request, mean_holding, parse_requests
from uma.units import GIB, MIB

LLAMA = "llama-3-8b"


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["estimate", *arguments, "--json"]) in (0, 3)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["estimate", *arguments]) == 2
    return capsys.readouterr().err


# --- the machine -------------------------------------------------------------------------------


def test_ram_is_memory_as_it_is_sold_and_macos_sets_the_limit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """64 GiB: 48 GiB to the GPU up to macOS 15, 51.84 from 26 (measured pairs, working_set.csv)."""
    found = document(capsys, LLAMA, "--ram", "64GB", "--macos", "15")
    assert found["machine"]["memory_bytes"] == 64 * GIB
    assert found["limit_bytes"] == 48 * GIB
    newer = document(capsys, LLAMA, "--ram", "64GB", "--macos", "26")
    assert newer["limit_bytes"] / GIB == pytest.approx(51.84, abs=0.01)
    unknown = document(capsys, LLAMA, "--ram", "64GB")
    assert (unknown["budget_bytes"], unknown["limit_bytes"]) == (48 * GIB, newer["limit_bytes"])


def test_the_gpu_limit_is_exact_and_overrides_the_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = document(capsys, LLAMA, "--ram", "64GB", "--gpu-limit", "57344MiB")
    assert found["limit_bytes"] == 57344 * MIB
    named = document(capsys, LLAMA, "--machine", "m4-max-64", "--gpu-limit", "20GiB")
    assert named["budget_bytes"] == 20 * GIB


def test_vram_and_host_ram_replace_what_the_catalog_knows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = document(capsys, LLAMA, "--machine", "rtx-4090", "--vram", "8GB", "--host-ram", "32GB")
    assert found["machine"]["memory_bytes"] == 8 * GIB
    assert found["machine"]["host_memory_bytes"] == 32 * GIB
    alone = document(capsys, LLAMA, "--vram", "24GB")
    assert (alone["machine"]["kind"], alone["limit_bytes"]) == ("discrete", 24 * GIB)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ram", "64GB", "--machine", "m4-max-64"], "--ram describes a whole machine"),
        (["--ram", "64"], "--ram"),
        (["--gpu-limit", "30", "--ram", "64GB"], "--gpu-limit"),
        (["--vram", "8GB", "--machine", "m4-max-64"], "--vram is for cards"),
        (["--host-ram", "8GB", "--machine", "m4-max-64"], "--host-ram is for machines with cards"),
        (["--macos", "26"], "--macos is for a machine that is described"),
        (["--gpu-limit", "99GiB", "--ram", "64GB"], "not within"),
    ],
)
def test_a_machine_that_contradicts_itself_is_refused(
    capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert words in refused(capsys, LLAMA, *options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--machine", "rtx-4090", "--macos", "26"], "--macos sets the GPU limit of a Mac"),
        (["--machine", "rtx-4090", "--host-ram", "1KB"], "less than a machine has"),
        (["--machine", "rtx-4090", "--bits", "4", "--quant", "Q8_0"], "--bits and --quant"),
        (["--ram", "64GB", "--bits", "8", "--quant", "4bit"], "--bits and --quant"),
        (["--machine", "rtx-4090", "-np", "4", "--batch-size", "2"], "--parallel 4 and --batch"),
        (["--machine", "rtx-4090", "-np", "257"], "256"),
        (["--machine", "rtx-4090", "-ub", "100000000000"], "65536"),
        (["--machine", "rtx-4090", "--batch-size", "1000000000000"], "1048576"),
        (["--machine", "rtx-4090", "--batch-size", str(10**20)], "1048576"),
        (
            ["--machine", "rtx-4090", "--engine", "vllm", "--gpu-memory-utilization", "nan"],
            "is no share",
        ),
        (["--machine", "rtx-4090", "--engine", "vllm", "--requests", ""], "512+128x9"),
        (["-c", "8x"], "such as 8192 or 8k"),
        (["-c", "0"], "such as 8192 or 8k"),
        (["-c", "9" * 5000], "such as 8192 or 8k"),
    ],
)
def test_what_would_be_left_out_or_means_nothing_is_refused(
    capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert words in refused(capsys, LLAMA, *options)


def test_equal_numbers_of_sequences_do_not_contradict(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, LLAMA, "--machine", "rtx-4090", "-np", "2", "--batch-size", "2")
    assert found["workload"]["batch_size"] == 2


def test_an_empty_name_is_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert "name is empty" in refused(capsys, "", "--ram", "64GB")
    assert "name is empty" in refused(capsys, "--model", "", "--ram", "64GB")


@pytest.mark.parametrize("command", ["estimate", "models"])
def test_a_context_is_told_in_thousands_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    options = [LLAMA, "--ram", "64GB", *(["--fits"] if command == "models" else []), "--json"]
    texts = set()
    for words in (["-c", "8k"], ["-c", "8192"], ["--context", "8,192"], []):
        assert main([command, *options, *words]) in (0, 3)
        texts.add(capsys.readouterr().out)
    monkeypatch.setenv("UMA_CONTEXT", "8K")
    assert main([command, *options]) in (0, 3)
    assert texts == {capsys.readouterr().out}


def test_models_refuse_a_speed_that_is_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--fits", "--ram", "64GB", "--min-tps", "nan"]) == 2
    assert "--min-tps nan" in capsys.readouterr().err


@pytest.mark.parametrize("engine", ["vllm", "transformers", "llama.cpp", "mlx"])
def test_more_context_than_the_model_was_made_for_is_noted(
    capsys: pytest.CaptureFixture[str], engine: str
) -> None:
    on = ["--ram", "64GB"] if engine == "mlx" else ["--machine", "2xh100"]
    notes = document(capsys, LLAMA, *on, "--engine", engine, "-c", "16384")["notes"]
    note = next(note for note in notes if "made for 8,192 tokens of context" in note)
    assert ("--max-model-len" in note) == (engine == "vllm")
    within = document(capsys, LLAMA, *on, "--engine", engine, "-c", "8192")["notes"]
    assert not any("made for" in note for note in within)


def test_the_title_shows_no_control_characters(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "a\x1b[2J\nb\u202ec"
    folder.mkdir()
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    more = {"intermediate_size": 64, "num_attention_heads": 1, "rms_norm_eps": 1e-5}
    (folder / "config.json").write_text(json.dumps(config | more))
    save_file({"model.norm.weight": np.zeros(64, np.float16)}, folder / "model.safetensors")
    main(["estimate", str(folder), "--ram", "64GB"])
    title = capsys.readouterr().out.splitlines()[0]
    assert title.endswith("a\\x1b[2J\\nb\\u202ec on 64.00 GiB of unified memory")


def test_a_step_that_is_lowered_in_vain_is_not_said_to_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = document(capsys, LLAMA, "--ram", "16GB", "--bits", "8", "-c", "60000")
    assert found["verdict"] == "exceeds"
    note = next(note for note in found["notes"] if "prefill step lowered" in note)
    assert note.endswith("to come closest")


def test_the_largest_tight_context_is_the_one_that_models_tells(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["--ram", "16GB", "-c", "4096", "--json"]
    assert main(["models", "qwen3-14b", "--fits", *options]) == 0
    listed = json.loads(capsys.readouterr().out)["models"]
    row = next(row for row in listed if row["verdict"] == "tight")
    found = document(capsys, row["name"], "--bits", str(row["bits"]), *options[:-1])
    assert found["verdict"] == "tight"
    assert found["tight_context_tokens"] == row["tight_context_tokens"]
    assert found["max_context_tokens"] == row["max_context_tokens"]
    main(["estimate", row["name"], "--bits", str(row["bits"]), *options[:-1]])
    assert f"tight up to {row['tight_context_tokens']:,}" in capsys.readouterr().out
    assert document(capsys, LLAMA, "--ram", "64GB")["tight_context_tokens"] is None


def test_it_is_noted_in_how_many_layers_a_cache_is_quantized(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Gemma 3 27B: every sixth of 62 layers attends to the whole context (its config.json)."""
    found = document(capsys, "gemma-3-27b", "--ram", "64GB", "--kv-bits", "8")
    assert any("quantizes the caches of 10 of 62 layers" in note for note in found["notes"])
    whole = document(capsys, LLAMA, "--ram", "64GB", "--kv-bits", "8")
    assert not any("quantizes" in note for note in whole["notes"])


# --- the engine --------------------------------------------------------------------------------

VALUES = {
    "mode": ["mxfp4"],
    "group_size": ["64"],
    "prefill_step_size": ["512"],
    "kv_bits": ["8"],
    "kv_group_size": ["64"],
    "exact": [],
    "parallel": ["2"],
    "cache_type_k": ["q8_0"],
    "cache_type_v": ["q8_0"],
    "ubatch_size": ["256"],
    "flash_attn": ["off"],
    "swa_full": [],
    "cache_ram": ["8192"],
    "kv_cache_dtype": ["fp8"],
    "gpu_memory_utilization": ["0.8"],
    "requests": ["512+128"],
    "attn_implementation": ["eager"],
}
MACHINES = {"mlx": "m4-max-64", "llama.cpp": "rtx-4090", "vllm": "rtx-4090"}


@pytest.mark.parametrize("name", OWN_OPTIONS)
def test_an_option_of_another_engine_is_refused_with_the_engine_that_has_it(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    owner = OWN_OPTIONS[name][0]
    option = [f"--{name.replace('_', '-')}", *VALUES[name]]
    for engine, machine in MACHINES.items():
        if engine != owner:
            error = refused(capsys, LLAMA, "--machine", machine, "--engine", engine, *option)
            assert f"{option[0]} is an option of {owner}, and the engine is {engine}" in error


@pytest.mark.parametrize("short", ["-np", "-ctk", "-ctv", "-ub", "-fa"])
def test_llama_cpps_short_options_are_refused_under_mlx(
    capsys: pytest.CaptureFixture[str], short: str
) -> None:
    value = {"-np": "2", "-ub": "256", "-fa": "on"}.get(short, "q8_0")
    assert "llama.cpp" in refused(capsys, LLAMA, "--ram", "64GB", short, value)


def test_a_setting_for_good_is_not_an_option_of_the_wrong_engine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UMA_KV_BITS", "8")
    assert document(capsys, LLAMA, "--machine", "rtx-4090")["model"]["cache_type"] == "f16"


def test_parallel_slots_have_the_context_each(capsys: pytest.CaptureFixture[str]) -> None:
    one = document(capsys, LLAMA, "--machine", "rtx-4090")
    two = document(capsys, LLAMA, "--machine", "rtx-4090", "--parallel", "2")
    cache = [{t["name"]: t["size_bytes"] for t in x["terms"]}["kv_cache"] for x in (one, two)]
    assert cache == [GIB, 2 * GIB]
    assert two["workload"]["batch_size"] == 2


def test_mlx_is_refused_for_a_card(capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(capsys, LLAMA, "--machine", "rtx-4090", "--engine", "mlx")
    assert "not on GeForce RTX 4090" in error


# --- --exact -----------------------------------------------------------------------------------


def test_the_trace_equals_the_closed_forms_and_names_its_backend(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("mlx.core")
    found = document(capsys, LLAMA, "--ram", "64GB", "--context", "2048", "--exact")
    sizes = {(t["name"], t["phase"]): t["size_bytes"] for t in found["terms"]}
    exact = found["exact"]
    assert exact["backend"] == "metal"
    assert "attention" in exact["stand_ins"]
    assert exact["weights_bytes"] == sizes["weights", "always"]
    assert exact["cache_bytes"] == sizes["kv_cache", "decode"]
    assert exact["prefill_peak_bytes"] <= exact["prefill_peak_ahead_bytes"]
    assert exact["weights_bytes"] < exact["decode_peak_bytes"] <= exact["prefill_peak_bytes"]


def test_a_trace_is_told_with_backend_stand_ins_and_peak(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("mlx.core")
    assert main(["estimate", LLAMA, "--ram", "64GB", "--context", "512", "--exact"]) == 0
    text = capsys.readouterr().out
    assert "traced on metal" in text
    # 8,029,995,008 numbers of 4.5 bits, and 65 norms of 4,096 in 16 bits.
    assert "weights 4.21 GiB (4,517,404,672 B)" in text
    assert "stand-ins for fused operations: attention" in text
    assert "liveness peak: prefill" in text


def in_a_process(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"HOME": str(folder), "XDG_CACHE_HOME": str(folder)}
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc")
def test_a_trace_of_70_billion_parameters_takes_no_transformers_and_under_400_mb(
    tmp_path: Path,
) -> None:
    pytest.importorskip("mlx.core")
    program = (
        "import sys; from uma.cli import main\n"
        "code = main(['estimate', 'llama-3-70b', '--ram', '192GB', '--exact'])\n"
        "status = open('/proc/self/status').read()\n"
        "peak = status.split('VmHWM:')[1].split()[0]\n"
        "print(code, 'transformers' in sys.modules, peak, file=sys.stderr)"
    )
    code, transformers, peak_kib = in_a_process(program, tmp_path).stderr.split()
    assert (code, transformers) == ("0", "False")
    assert int(peak_kib) * 1024 < 400e6


def test_the_rest_of_mlx_lm_is_there_when_it_is_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("mlx.core")
    program = (
        "import sys; from uma.runtime.bare_package import bare_mlx_lm\n"
        "bare_mlx_lm(); import mlx_lm.models.llama\n"
        "before = 'mlx_lm.utils' in sys.modules\n"
        "from mlx_lm import load; import mlx_lm.models.cache\n"
        "print(before, load.__module__, mlx_lm.models.llama.Model.__name__, file=sys.stderr)"
    )
    assert in_a_process(program, tmp_path).stderr.split() == ["False", "mlx_lm.utils", "Model"]


def test_exact_without_mlx_says_what_to_install(tmp_path: Path) -> None:
    program = (
        "import sys; from importlib import util; find = util.find_spec\n"
        "util.find_spec = lambda name, *a: None if name.startswith('mlx') else find(name, *a)\n"
        "from uma.cli import main\n"
        f"sys.exit(main(['estimate', '{LLAMA}', '--ram', '64GB', '--exact']))"
    )
    done = in_a_process(program, tmp_path)
    assert done.returncode == 1
    assert "pip install mlx mlx-lm" in done.stderr


def test_an_estimate_loads_neither_numpy_nor_mlx_nor_anything_of_the_network(
    tmp_path: Path,
) -> None:
    program = (
        "import sys; from uma.cli import main\n"
        "code = main(['estimate', 'llama-3-70b', '--machine', 'mac-studio-m2-ultra-192'])\n"
        "heavy = {'numpy', 'mlx', 'mlx_lm', 'transformers', 'huggingface_hub', 'gguf', 'psutil',\n"
        "         'socket', 'ssl', 'urllib.request', 'http.client', 'rich'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr); sys.exit(code)"
    )
    done = in_a_process(program, tmp_path)
    assert (done.returncode, done.stderr) == (0, "[]\n")


def test_the_benchmark_estimates_every_model_on_every_mac() -> None:
    script = Path(__file__).parent.parent / "scripts" / "bench_estimate.py"
    options = ["--models", "3", "--macs", "4", "--runs", "1", "--inverses", "--json"]
    done = subprocess.run(
        [sys.executable, str(script), *options], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert (found["estimates"], found["macs"]) == (12, 4)
    assert min(found["cold_ms"], *found["training_ms"].values()) > found["python_ms"] > 0


# --- pages -------------------------------------------------------------------------------------


def test_pages_and_contiguous_reservation_are_told_for_given_requests(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = "512+128x9,4096+512"
    found = document(
        capsys,
        *(LLAMA, "--engine", "vllm", "--machine", "rtx-4090"),
        *("--batch-size", "8", "--requests", text),
    )["paging"]
    assert found["contiguous_bytes"] == 8 * 8192 * 131_072  # 128 KiB a token (Llama 3 8B)
    counted = simulated_holding(parse_requests(text), 8192)
    assert found["paged_bytes"] == pytest.approx(counted.paged_bytes(131_072, 8), rel=0.05)
    assert found["paged_waste"] < 0.04 < found["contiguous_waste"]  # under 4 % (vLLM's paper)


def test_requests_that_are_not_written_so_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("512", "512+", "a+b", ""):
        error = refused(capsys, LLAMA, "--engine", "vllm", "--requests", text or ",")
        assert "512+128x9" in error
    assert parse_requests("1+2, 3+4x5") == (Request(1, 2), Request(3, 4, 5))
    assert mean_holding(parse_requests("16+16"), 64).used_slots > 16
