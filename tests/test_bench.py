"""``uma bench``: rates, the ledger, and a row in the layout of the published measurements."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core", reason="runs models")

import subprocess
import sys

from models import saved_model
from test_cli_run import document, environment

from uma.records import model_name

# The header of the table of 2,897 measurements that the predictions are held against.
LAYOUT = (
    "rec_id,kind,source,source_type,source_date,engine,engine_version,backend,model,model_file,"
    "params_b,active_params_b,arch,quant,bits_per_weight,group_size,weights_size,weights_unit,"
    "machine,chip,gpu_cores,gpu_count,mem_per_device_gb,bandwidth_gbs,ctx_alloc,prompt_tokens,"
    "gen_tokens,depth_tokens,batch,ubatch,kv_dtype,flash_attn,offload_layers,mem_metric,mem_value,"
    "mem_unit,mem_gib_norm,mem_weights,mem_kv,mem_compute,mem_other,pp_tok_s,tg_tok_s,speed_std,"
    "outcome,confidence,notes"
)


def bench(home: Path, *arguments: object, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "uma", "bench", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment(home, **variables),
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model("full", tmp_path_factory.mktemp("models") / "my-secret-model")


SHORT = ("-p", 32, "-g", 8, "-n", 2)


@pytest.mark.parametrize("batch", [1, 3])
def test_the_row_has_every_column_and_says_what_was_measured(
    batch: int, model: Path, tmp_path: Path
) -> None:
    found = document(bench(tmp_path, model, *SHORT, "-b", batch, "--json"))
    row: dict[str, Any] = found["row"]
    assert ",".join(row) == LAYOUT
    assert (row["prompt_tokens"], row["gen_tokens"], row["batch"]) == (32, 8, batch)
    terms = {(t["name"], t["phase"]): t["measured_bytes"] for t in found["ledger"]["terms"]}
    assert row["mem_weights"] == row["weights_size"] == terms["weights", "always"]
    assert row["mem_kv"] == terms["kv_cache", "decode"]
    assert row["mem_value"] > row["mem_weights"] + row["mem_kv"]
    assert row["pp_tok_s"] == pytest.approx(found["prompt_tps"], abs=0.01)
    assert row["arch"] == row["flash_attn"] == ""


def test_the_row_names_no_folder_of_this_machine(model: Path, tmp_path: Path) -> None:
    row = document(bench(tmp_path, model, *SHORT, "--json"))["row"]
    assert row["model"] == "local model"
    assert "secret" not in str(row)
    assert model_name("/home/ann/Qwen3-4B", local=True) == "Qwen3-4B"


def test_a_model_as_argument_overrules_the_one_that_is_set(model: Path, tmp_path: Path) -> None:
    found = document(bench(tmp_path, model, *SHORT, "--json", UMA_MODEL="llama-3-8b"))
    assert found["model"]["name"] == str(model)


def test_without_json_there_are_rates_and_a_ledger(model: Path, tmp_path: Path) -> None:
    done = bench(tmp_path, model, *SHORT)
    assert done.returncode == 0, done.stderr
    assert "generation" in done.stdout
    assert "kv_cache" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("llama-3-8b", "--model", "qwen3-4b"), "the model is given twice"),
        (("llama-3-8b", "--dequantize", "perhaps"), "perhaps"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    arguments: tuple[str, ...], text: str, tmp_path: Path
) -> None:
    done = bench(tmp_path, *arguments)
    assert done.returncode == 2
    assert text in done.stderr
