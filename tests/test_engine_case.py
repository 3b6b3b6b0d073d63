"""`uma estimate` under engines that are not MLX: what they take by default, load, split, refuse."""

import json
from typing import Any

import pytest

from uma.cli import main
from uma.machine.named import machine_named
from uma.plan.choice import Wanted, what_fits
from uma.units import GIB

GPT_OSS = ("estimate", "gpt-oss-20b", "--machine", "h100", "--engine", "transformers")
VLLM = ("--engine", "vllm")


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    main([*arguments, "--json"])
    return dict(json.loads(capsys.readouterr().out))


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 2
    return capsys.readouterr().err


def sizes(found: dict[str, Any]) -> dict[str, int]:
    terms: dict[str, int] = {}
    for term in found["terms"]:
        terms[term["name"]] = max(terms.get(term["name"], 0), term["size_bytes"])
    return terms


def test_gpt_oss_holds_the_scores_of_eager_attention_unless_a_kernel_is_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """64 heads of 8,191 x 8,191 scores in three copies of 2 bytes beside masks."""
    eager = document(capsys, *GPT_OSS)
    flash = document(capsys, *GPT_OSS, "--attn-implementation", "flash_attention_2")
    scores = 64 * 8191**2 * 2 * 3
    assert scores < sizes(eager)["attention"] < scores + GIB
    assert sizes(flash)["attention"] < GIB
    assert "attn_implementation eager" in eager["workload"]["settings"]
    assert any("attention is eager" in note for note in eager["notes"])


def test_an_attention_that_transformers_refuses_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = refused(capsys, *GPT_OSS, "--attn-implementation", "sdpa")
    assert "transformers has no sdpa for gpt_oss" in error


@pytest.mark.parametrize("machine", ["2xh100", "rtx-4090"])
def test_what_is_offered_under_vllm_is_within_what_it_reserves(machine: str) -> None:
    found = what_fits(machine_named(machine), Wanted(engine="vllm", limit=4))
    assert len(found.found) == 4
    assert {one.verdict for one in found.found} == {"fits"}
    assert found.budget.budget_bytes <= 0.92 * found.machine.memory_bytes


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_engines_of_cuda_are_refused_on_a_mac(
    capsys: pytest.CaptureFixture[str], engine: str
) -> None:
    asked = ("--machine", "m4-max-64", "--engine", engine)
    assert f"--engine {engine}: its memory is known on CUDA" in refused(
        capsys, "estimate", "llama-3-8b", *asked
    )
    assert "not on Apple M4 Max" in refused(capsys, "models", "--fits", *asked)


@pytest.mark.parametrize(("machine", "count"), [("2xh100", 2), ("8xh200", 8)])
def test_several_cards_are_split_by_heads_as_the_settings_say(
    capsys: pytest.CaptureFixture[str], machine: str, count: int
) -> None:
    found = document(capsys, "estimate", "llama-3-70b", "--machine", machine, *VLLM)
    assert f"--tensor-parallel-size {count}" in found["workload"]["settings"]
    notes = " ".join([*found["notes"], *found["machine"].get("notes", [])])
    assert "splits every matrix" in notes
    assert "whole layers" not in notes


def test_heads_that_cannot_be_split_are_split_by_layers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Three cards do not divide 64 heads."""
    found = document(capsys, "estimate", "llama-3-70b", "--machine", "3xh100", *VLLM)
    assert "--pipeline-parallel-size 3" in found["workload"]["settings"]
    assert any("whole layers" in note for note in found["notes"])


def test_latents_and_activations_are_on_every_card(capsys: pytest.CaptureFixture[str]) -> None:
    """Eight cards cannot share the one latent of DeepSeek V3: 61 layers of 576 numbers."""
    found = document(capsys, "estimate", "deepseek-v3", "--machine", "8xh200", *VLLM)
    one = document(capsys, "estimate", "deepseek-v3", "--machine", "h200", *VLLM)
    assert sizes(found)["kv_cache"] == 8 * 8192 * 61 * 576 * 2
    assert sizes(found)["logits"] == 8 * sizes(one)["logits"]
    assert sizes(found)["weights"] == sizes(one)["weights"]


def test_heads_of_keys_are_shared_by_as_many_cards(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("estimate", "llama-3-70b", *VLLM, "--machine")
    one, eight = (sizes(document(capsys, *asked, name)) for name in ("h200", "8xh200"))
    assert eight["kv_cache"] == one["kv_cache"]


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_engines_that_load_the_vision_tower_have_its_weights(
    capsys: pytest.CaptureFixture[str], engine: str
) -> None:
    """google/gemma-3-12b-it: 12,187,325,040 parameters by the hub's count, in 16 bits."""
    found = document(capsys, "estimate", "gemma-3-12b", "--machine", "h100", "--engine", engine)
    weights = sum(t["size_bytes"] for t in found["terms"] if t["name"] == "weights")
    assert weights == pytest.approx(2 * 12_187_325_040, rel=1e-4)
    assert any("vision tower" in note and "counted" in note for note in found["notes"])


@pytest.mark.parametrize("model", ["gemma-3-12b", "deepseek-v3"])
@pytest.mark.parametrize("engine", ["vllm", "transformers", "llama.cpp"])
def test_notes_do_not_tell_of_mlx_lm_under_another_engine(
    capsys: pytest.CaptureFixture[str], engine: str, model: str
) -> None:
    found = document(capsys, "estimate", model, "--machine", "8xh200", "--engine", engine)
    about = [note for note in found["notes"] if "vision tower" in note or "multi-token" in note]
    assert about
    assert not any("mlx" in note for note in about)
