"""Where `uma run` gets models from: a hub, a GGUF file, the package index; drafts and adapters."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fakehub import serving
from models import saved_model
from test_cli_run import document, environment, uma

mx = pytest.importorskip("mlx.core", reason="runs models")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model("full", tmp_path_factory.mktemp("models") / "full")


def test_a_repository_is_downloaded_only_after_a_yes(tmp_path: Path, model: Path) -> None:
    with serving(org__tiny=model) as hub:
        there = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
        asked = uma(tmp_path, "org/tiny", "Hi", **there)
        assert (asked.returncode, asked.stdout) == (2, "")
        assert "--yes" in asked.stderr
        assert "to download" in asked.stderr
        found = document(
            uma(tmp_path, "org/tiny", "Hi", "--yes", "--max-tokens", 3, "--json", **there)
        )
    again = document(uma(tmp_path, "org/tiny", "Hi", "--max-tokens", 3, "--json"))
    local = document(uma(tmp_path, model, "Hi", "--max-tokens", 3, "--json"))
    assert found["text"] == again["text"] == local["text"]


def test_what_cannot_fit_is_refused_before_the_download(tmp_path: Path, model: Path) -> None:
    with serving(org__tiny=model) as hub:
        there = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
        done = uma(tmp_path, "org/tiny", "Hi", "--yes", "--budget", "1MiB", **there)
    assert done.returncode == 3, done.stderr
    assert list((tmp_path / "hf").rglob("*.safetensors")) == []


def test_a_dead_hub_is_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    there = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    done = uma(tmp_path, "org/tiny", "Hi", "--yes", **there)
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert "folder" in done.stderr


def test_a_draft_model_stands_in_the_ledger_and_changes_no_token(
    tmp_path: Path, model: Path
) -> None:
    arguments = (model, "Hello there", "--max-tokens", 12, "--temp", 0, "--json")
    plain = document(uma(tmp_path, *arguments))
    drafted = document(uma(tmp_path, *arguments, "--draft-model", model))
    names = {t["name"] for t in drafted["ledger"]["terms"]}
    assert {"draft_weights", "draft_kv_cache"} <= names
    assert drafted["draft_tokens"] > 0
    assert drafted["text"] == plain["text"]


def test_an_adapter_is_used_and_stands_in_the_ledger(tmp_path: Path, model: Path) -> None:
    adapter = saved_adapter(model, tmp_path / "adapter")
    arguments = (model, "Hello there", "--max-tokens", 8, "--temp", 0, "--json")
    plain = document(uma(tmp_path, *arguments))
    adapted = document(uma(tmp_path, *arguments, "--adapter-path", adapter))
    terms = {t["name"]: t for t in adapted["ledger"]["terms"]}
    assert terms["adapters"]["predicted_bytes"] == terms["adapters"]["measured_bytes"] > 0
    assert terms["weights"]["predicted_bytes"] == terms["weights"]["measured_bytes"]
    assert adapted["text"] != plain["text"]


def saved_adapter(model: Path, folder: Path) -> Path:
    """A LoRA adapter of random numbers for ``model``, in mlx-lm's format."""
    from mlx.utils import tree_flatten
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load_model

    config = {
        "fine_tune_type": "lora",
        "num_layers": 4,
        "lora_parameters": {"rank": 4, "scale": 20.0, "dropout": 0.0},
    }
    network, _ = load_model(model)
    network.freeze()
    linear_to_lora_layers(network, config["num_layers"], config["lora_parameters"])
    trainable = tree_flatten(network.trainable_parameters())
    mx.random.seed(1)
    weights = {name: mx.random.normal(value.shape) for name, value in trainable}
    folder.mkdir()
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_a_missing_adapter_is_a_clear_error(tmp_path: Path, model: Path) -> None:
    done = uma(tmp_path, model, "Hi", "--adapter-path", tmp_path / "none")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "holds no adapter" in done.stderr


@pytest.mark.slow
def test_the_default_model_says_paris_and_its_peak_is_within_five_per_cent(tmp_path: Path) -> None:
    question = "What is the capital of France?"
    found = document(uma(tmp_path, "--prompt", question, "--json", "--dequantize", "auto"))
    ledger = found["ledger"]
    assert "Paris" in found["text"]
    error = ledger["predicted_peak_bytes"] / ledger["measured_peak_bytes"] - 1
    assert abs(error) <= 0.05
    assert exact_terms(ledger) == exact_terms(ledger, "measured_bytes")
    done = subprocess.run(
        [sys.executable, "-m", "uma", "bench", "-p", "32", "-g", "4", "-n", "1", "--json"],
        capture_output=True,
        text=True,
        env=environment(tmp_path),
    )
    bench = json.loads(done.stdout)
    assert bench["prompt_tps"] > 0
    assert bench["row"]["mem_metric"] == "MLX peak memory"


def exact_terms(ledger: dict[str, Any], key: str = "predicted_bytes") -> list[int]:
    return [t[key] for t in ledger["terms"] if t["basis"] == "exact"]
