"""Matrices with adapters under torch, by the names that models give them."""

import json
from typing import Any

import pytest

from uma.cli import main

TORCH = ["--engine", "transformers", "--machine", "h200", "--batch-size", "1"]


def estimated(capsys: Any, *words: str) -> dict[str, Any]:
    assert main(["estimate", *words, *TORCH, "--mem-kind", "allocated", "--json"]) in (0, 3)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("opt-30b", "q_proj,k_proj,v_proj,out_proj,fc1,fc2"),
        ("falcon-7b", "query_key_value,dense,dense_h_to_4h,dense_4h_to_h"),
        ("internlm2-7b", "wqkv,wo,w1,w2,w3"),
        ("mamba-2.8b", "in_proj,x_proj,dt_proj,out_proj"),
        ("llama-3-8b", "self_attn.q_proj,k_proj,v_proj,o_proj,mlp.gate_proj,up_proj,down_proj"),
    ],
)
def test_all_matrices_by_their_names_need_what_all_need(
    model: str, names: str, capsys: Any
) -> None:
    """PEFT's ``target_modules``: an ending of a module's path, from a dot on."""
    asked = [model, "--train", "lora"]
    every, named = estimated(capsys, *asked), estimated(capsys, *asked, "--targets", names)
    assert every["trainable_parameters"] == named["trainable_parameters"]
    assert every["total_bytes"] == named["total_bytes"]


def test_queries_from_a_latent_have_adapters_as_other_queries_have(capsys: Any) -> None:
    asked = ["deepseek-v3", "--train", "lora", "--targets"]
    first, both = (estimated(capsys, *asked, names) for names in ("o_proj", "o_proj,q_b_proj"))
    adapters = 4 * 8 * 61 * (1536 + 128 * 192) * 4  # float32: factors, gradients, two states
    assert both["total_bytes"] - first["total_bytes"] > adapters


@pytest.mark.parametrize(
    ("model", "targets", "said"),
    [
        ("qwen3-30b-a3b", "gate", "no matrix is named gate"),  # transformers 5: a bare parameter
        ("llama-3-8b", "proj", "no matrix is named proj"),  # not from a dot on
        ("mamba-2.8b", "x_proj,dt_proj", "of in_proj, out_proj"),
    ],
)
def test_names_of_which_nothing_is_known_are_refused(
    model: str, targets: str, said: str, capsys: Any
) -> None:
    assert main(["estimate", model, "--train", "lora", *TORCH, "--targets", targets]) == 2
    assert said in capsys.readouterr().err


def test_names_that_the_trained_layers_lack_are_said_to_be_of_them(capsys: Any) -> None:
    """Some of these 16 layers have no attention, which is no reason to refuse the others."""
    words = ["llama-3_3-nemotron-super-49b", "--train", "lora", "--num-layers", "16"]
    mac = ["--machine", "mac-studio-m3-ultra-512", "--batch-size", "1", "--max-seq-length", "64"]
    for engine in (mac, TORCH):
        assert main(["estimate", *words, *engine, "--targets", "q_proj"]) == 0
        assert main(["estimate", *words, *engine, "--targets", "foo"]) == 2
        assert "its last 16 layers have down_proj, gate_proj, k_proj" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("machine", ["mac-studio-m3-ultra-512", "h100"])
def test_packed_matrices_are_not_trained(machine: str, kind: str, capsys: Any) -> None:
    words = ["estimate", "bitnet-b1.58-2b-4t", "--train", kind, "--machine", machine]
    assert main(words) == 2
    assert "are packed, several numbers to a byte" in capsys.readouterr().err


def test_what_adapters_keep_in_part_is_told(capsys: Any) -> None:
    found = estimated(capsys, "mamba-2.8b", "--train", "lora", "--targets", "in_proj,x_proj")
    assert "values that adapters of x_proj keep are not counted" in found["notes"]


def test_dora_of_a_mixture_trains_what_lora_does(capsys: Any) -> None:
    """PEFT's all-linear leaves out stacked experts: magnitudes of rows are all that is more."""
    lora, dora = (
        estimated(capsys, "qwen3-30b-a3b", "--train", kind)["trainable_parameters"]
        for kind in ("lora", "dora")
    )
    assert lora == 6_684_672
    assert dora - lora == 48 * (32 * 128 + 2 * 4 * 128 + 2048)
    words = ["estimate", "qwen3-30b-a3b", "--train", "dora", "--targets", "down_proj", *TORCH]
    assert main(words) == 2
    assert "stacked experts" in capsys.readouterr().err


def test_a_gate_of_one_row_does_not_make_a_rank_too_large(capsys: Any) -> None:
    """The shared expert's gate, which everybody trains."""
    found = estimated(capsys, "qwen3-next-80b-a3b", "--train", "lora")
    assert not any("full rank" in note for note in found["notes"])
    above = estimated(capsys, "llama-3-8b", "--train", "lora", "--rank", "1025")
    assert any("a rank of 1025 is above 1024" in note for note in above["notes"])
