"""What the stacks of PyTorch hold, each case against a fact of its source or a published figure."""

from dataclasses import replace
from typing import Any

import pytest
from test_training_stacks import CARD, estimated
from test_training_torch import model

from uma.cli import main
from uma.engines.torch_training import training_terms
from uma.ledger import peak, phase_totals
from uma.memory.loss import Copies
from uma.plan.training.stack import Stack
from uma.plan.training.stacks import settings_for
from uma.units import GIB
from uma.workload import TrainingWorkload

SHORT = ["--batch-size", "1", "--max-seq-length", "16", "--mem-kind", "allocated"]
OFFLOADED = ["--zero-stage", "3", "--offload-optimizer", "host", "--offload-parameters", "host"]


def terms_of(found: dict[str, Any], phase: str) -> dict[str, int]:
    """Bytes of each name in ``phase``."""
    sizes: dict[str, int] = {}
    for term in found["terms"]:
        if term["phase"] == phase:
            sizes[term["name"]] = sizes.get(term["name"], 0) + term["size_bytes"]
    return sizes


@pytest.mark.parametrize("words", [[], ["--num-layers", "2"], ["--devices", "8", "--fsdp", "full"]])
def test_gradients_of_full_training_are_a_term_of_both_phases(
    words: list[str], capsys: Any
) -> None:
    """Two bytes for each trained number, or a device's part of them, and the root's whole."""
    asked = ["llama-3-8b", *CARD, "--train", "full", *SHORT]
    found = estimated(capsys, *asked, *words)
    whole, root = 2 * found["trainable_parameters"], 2 * 2 * 128_256 * 4096
    part = whole // 8 + root * 7 // 8
    assert terms_of(found, "optimizer")["gradients"] == -(-whole // (8 if "--fsdp" in words else 1))
    backward = terms_of(found, "backward")
    assert backward["gradients"] == pytest.approx(part if "--fsdp" in words else whole, rel=1e-3)
    assert backward["activations"] > 0


def test_gradients_of_long_rows_are_those_that_are_there_when_most_is_needed(capsys: Any) -> None:
    """Logits are four times the vocabulary of 8,192 tokens: no gradient is there before them."""
    asked = ["llama-3-8b", *CARD, "--train", "full", "--mem-kind", "allocated"]
    assert terms_of(estimated(capsys, *asked), "backward")["gradients"] == 0
    again = estimated(capsys, *asked, "--grad-checkpoint", "--max-seq-length", "256")
    found = next(t for t in again["terms"] if (t["name"], t["phase"]) == ("gradients", "backward"))
    assert found["basis"] == "bound"
    assert found["size_bytes"] == pytest.approx(2 * 8_030_261_248, rel=0.01)


@pytest.mark.parametrize("name", ["fp16", "FP16", "float16"])
def test_weights_in_float16_are_said_to_be(name: str, capsys: Any) -> None:
    found = estimated(capsys, "llama-3-8b", *CARD, "--train", "lora", "--quant", name)
    (weights,) = (t for t in found["terms"] if (t["name"], t["phase"]) == ("weights", "always"))
    assert weights["source"] == "shapes x float16"


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-8bit"])
def test_no_activations_are_less_than_none(optimizer: str, capsys: Any) -> None:
    asked = ["llama-3-8b", *CARD, "--train", "full", "--devices", "8", "--zero-stage", "1", *SHORT]
    found = estimated(capsys, *asked, "--optimizer", optimizer)
    assert min(term["size_bytes"] for term in found["terms"]) >= 0


def test_roots_of_second_moments_are_no_activations(capsys: Any) -> None:
    asked = ["llama-3-8b", *CARD, "--train", "full", "--stack", "trainer-2024"]
    sizes = terms_of(estimated(capsys, *asked), "optimizer")
    assert sizes["other"] == sizes["gradients"]
    assert "activations" not in sizes


@pytest.mark.parametrize("name", ["gpt-oss-20b", "qwen3-30b-a3b", "mixtral-8x7b"])
@pytest.mark.parametrize("quant", ["nf4", "int8"])
def test_stacked_experts_stay_in_16_bits_as_they_do_for_inference(
    name: str, quant: str, capsys: Any
) -> None:
    asked = [name, "--engine", "transformers", "--machine", "h200", "--quant", quant]
    trained = estimated(capsys, *asked, "--train", "lora", "--batch-size", "1")
    held = estimated(capsys, *asked)
    assert terms_of(trained, "always")["weights"] == terms_of(held, "always")["weights"]


def test_all_linear_has_no_adapters_of_stacked_experts_and_routers(capsys: Any) -> None:
    """Qwen3-30B-A3B, 48 layers: q 2,048 x 4,096, k and v 2,048 x 512, o 4,096 x 2,048."""
    asked = ["qwen3-30b-a3b", "--machine", "h200", "--train", "lora", "--rank", "8"]
    found = estimated(capsys, *asked)
    rows = 2 * (2048 + 4096) + 2 * (2048 + 512)
    assert found["trainable_parameters"] == 48 * 8 * rows
    before = estimated(capsys, *asked, "--stack", "trainer-2024")
    assert before["trainable_parameters"] > 50 * found["trainable_parameters"]


def test_the_layers_below_the_first_adapter_keep_nothing(capsys: Any) -> None:
    """Two of 32 layers: 15.0 GiB of weights, 1 of two layers, 2.5 to 3.4 of logits."""
    asked = ["llama-3-8b", *CARD, "--train", "lora", "--mem-kind", "allocated"]
    few, all_of_them = (
        estimated(capsys, *asked, *words)["total_bytes"] for words in (["--num-layers", "2"], [])
    )
    assert 18.4 * GIB < few < 19.5 * GIB
    assert all_of_them > few + 30 * 0.4 * GIB


@pytest.mark.parametrize("words", [[], ["--grad-checkpoint"]])
def test_the_last_layers_alone_have_gradients_in_full_training(
    words: list[str], capsys: Any
) -> None:
    """Two layers of Llama-3-8B have 218,112,000 numbers each."""
    asked = ["llama-3-8b", *CARD, "--train", "full", "--num-layers", "2", *words]
    found = estimated(capsys, *asked, *SHORT)
    assert found["trainable_parameters"] == 2 * 218_112_000
    gradients = terms_of(found, "backward")["gradients"]
    assert gradients == pytest.approx(2 * 2 * 218_112_000, rel=1e-3)
    assert estimated(capsys, *asked, "--mem-kind", "allocated")["total_bytes"] < 21 * GIB


@pytest.mark.parametrize(
    ("name", "machine", "tokens"),
    [
        ("llama-3-70b", "rtx-6000-ada", 12_106),
        ("llama-3-70b", "a100-sxm4-80gb", 89_389),
        ("llama-3.1-8b", "a100-sxm4-80gb", 342_733),
    ],
)
def test_unsloth_reaches_the_lengths_that_it_publishes(
    name: str, machine: str, tokens: int, capsys: Any
) -> None:
    """unsloth.ai/blog/llama3-3: QLoRA of rank 32 with its cut cross-entropy, one row."""
    asked = [name, "--machine", machine, "--train", "qlora", "--rank", "32", "--stack", "unsloth"]
    asked += ["--batch-size", "1", "--max-seq-length", "1024", "--optimizer", "adamw-8bit"]
    found = estimated(capsys, *asked)
    assert found["largest"]["max_seq_length"] == pytest.approx(tokens, rel=0.25)


@pytest.mark.parametrize("every", [[], ["--grad-checkpoint", "--checkpoint-every", "4"]])
def test_unsloths_checkpoints_are_counted_on_the_host(every: list[str], capsys: Any) -> None:
    """An input of 4,096 16-bit numbers a token, of 32 layers or of each fourth."""
    asked = ["llama-3-8b", *CARD, "--train", "qlora", "--stack", "unsloth"]
    found = estimated(capsys, *asked, "--max-seq-length", "100000", "--host-ram", "512GB", *every)
    kept = 8 if every else 32
    assert found["sharding"]["host_bytes"] == kept * 100_000 * 4096 * 2
    little = estimated(capsys, *asked, "--max-seq-length", "100000", "--host-ram", "24GB")
    assert little["verdict"] == "exceeds"


def test_matrices_with_dora_are_left_to_peft_by_unsloths_kernels(capsys: Any) -> None:
    asked = ["llama-3-8b", *CARD, "--mem-kind", "allocated", "--stack", "unsloth"]
    lora, dora = (
        estimated(capsys, *asked, "--train", train)["total_bytes"] for train in ("lora", "dora")
    )
    assert dora > 1.02 * lora


def test_the_first_stage_of_a_pipeline_holds_the_embeddings_too(capsys: Any) -> None:
    """Gemma 2 9B, 42 layers in 8 stages: 6 of 198,193,152 numbers, and the tied 256,000 x 3,584."""
    asked = ["gemma-2-9b", "--machine", "8xa100-sxm4-80gb", "--train", "full", "--batch-size", "1"]
    asked += ["--pipeline", "8", "--grad-accumulation-steps", "8", "--mem-kind", "allocated"]
    found = estimated(capsys, *asked)
    stage = 6 * 198_193_152 + 256_000 * 3584
    sizes = terms_of(found, "always")
    assert sizes["weights"] == pytest.approx(2 * stage, rel=1e-4)
    assert sizes["optimizer_states"] == pytest.approx(4 * stage, rel=1e-4)
    assert terms_of(found, "optimizer")["gradients"] == pytest.approx(2 * stage, rel=1e-4)
    assert found["sharding"]["device_state_bytes"] == pytest.approx(8 * stage, rel=1e-4)


def test_a_head_of_its_own_is_in_the_last_stage(capsys: Any) -> None:
    """Llama-3-8B in 4 stages: 8 of 32 layers, and half of 2 x 128,256 x 4,096."""
    asked = ["llama-3-8b", "--machine", "4xa100-sxm4-80gb", "--train", "full", "--batch-size", "1"]
    found = estimated(capsys, *asked, "--pipeline", "4", "--grad-accumulation-steps", "4")
    stage = 8 * 218_112_000 + 128_256 * 4096
    assert terms_of(found, "always")["weights"] == pytest.approx(2 * stage, rel=1e-4)


def test_adafactors_update_makes_four_float32_arrays_of_the_embeddings(capsys: Any) -> None:
    """Of 128,256 x 4,096 numbers: gradient, parameter, the square and its sum with a constant."""
    asked = ["llama-3-8b", *CARD, "--train", "full", "--optimizer", "adafactor"]
    sizes = terms_of(estimated(capsys, *asked, "--grad-checkpoint"), "optimizer")
    assert sizes["other"] == 4 * 4 * 128_256 * 4096


def test_muon_leaves_embeddings_head_and_norms_to_adamw(capsys: Any) -> None:
    """One array of momentum for the matrices of Llama-3-8B, two moments for the others."""
    asked = ["llama-3-8b", *CARD, "--train", "full", "--optimizer", "muon"]
    found = estimated(capsys, *asked)
    rest = 2 * 128_256 * 4096 + 65 * 4096
    expected = 2 * (found["trainable_parameters"] + rest)
    assert terms_of(found, "always")["optimizer_states"] == expected


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--train", "lora", "--quant", "mxfp4"], "no adapters on mxfp4"),
        (["--train", "lora", "--quant", "fp8", "--stack", "trainer-2024"], "no adapters on fp8"),
        (["--train", "lora", "--quant", "nvfp4"], "no adapters on compressed-tensors-nvfp4"),
        (["--train", "lora", "--quant", "gptq", "--stack", "torchtune"], "torchtune has no"),
        (["--train", "lora", "--quant", "int8", "--stack", "torchtune"], "torchtune has no"),
        (["--train", "lora", "--quant", "awq", "--stack", "unsloth"], "unsloth has no adapters"),
        (["--train", "dora", "--quant", "gptq"], "no DoRA on gptq"),
        (["--train", "dora", "--quant", "awq"], "no DoRA on awq"),
        (
            [
                "--train",
                "full",
                "--num-layers",
                "2",
                "--grad-checkpoint",
                "--stack",
                "trainer-2024",
            ],
            "no gradients where no input needs one",
        ),
        (["--train", "lora", "--tensor", "8", "--sequence", "8"], "not divisible by 64"),
        (["--train", "full", "--quant", "fp32"], "leave it out; float32 weights"),
        (
            ["--train", "full", "--quant", "fp32", "--precision", "mixed"],
            "leave it out; float32 weights are trained with --precision mixed",
        ),
        (["--train", "full", "--stack", "torchtune", "--precision", "mixed"], "has no autocast"),
        (["--train", "lora", "--stack", "unsloth", "--loss", "naive"], "leave --loss out"),
        (["--train", "lora", "--fused-kernels", "liger", "--loss", "naive"], "Liger's loss"),
        (["--train", "lora", "--stack", "unsloth", *OFFLOADED], "without ZeRO and FSDP"),
        (["--train", "lora", "--optimizer", "adamw-8bit", *OFFLOADED], "float32 Adam"),
        (
            ["--train", "full", "--optimizer", "adamw-8bit", "--devices", "2", "--fsdp", "full"],
            "does not go with FSDP",
        ),
        (["--train", "lora", "--macos", "26"], "which A100 SXM4 80GB is not"),
        (["--train", "lora", "--exact"], "--exact traces mlx-lm's own code"),
    ],
)
def test_bases_and_splits_that_nothing_trains_are_refused(
    words: list[str], reason: str, capsys: Any
) -> None:
    name = "gpt-oss-20b" if "mxfp4" in words else "llama-3-8b"
    assert main(["estimate", name, *CARD, *words]) == 2
    assert reason in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--machine", "mac-mini-m4-16", "--attention", "fused"], "mlx_lm.lora has no fused"),
        (
            ["--machine", "mac-mini-m4-16", "--trainer", "uma", "--attention", "materialised"],
            "always computes attention in slices",
        ),
        (["--machine", "dgx-spark", "--engine", "mlx"], "training under MLX is known on Macs"),
    ],
)
def test_what_mlx_does_not_do_is_refused(words: list[str], reason: str, capsys: Any) -> None:
    assert main(["estimate", "llama-3-8b", "--train", "lora", *words]) == 2
    assert reason in capsys.readouterr().err


def test_ligers_kernels_make_no_logits(capsys: Any) -> None:
    """Liger-Kernel, transformers/monkey_patch.py: ``fused_linear_cross_entropy=True``."""
    asked = ["llama-3-8b", *CARD, "--train", "lora", "--batch-size", "4", "--grad-checkpoint"]
    asked += ["--mem-kind", "allocated"]
    liger = estimated(capsys, *asked, "--fused-kernels", "liger")
    assert liger["total_bytes"] < estimated(capsys, *asked, "--loss", "sliced")["total_bytes"]
    whole = estimated(capsys, *asked, "--fused-kernels", "liger", "--loss", "fused")
    assert whole["total_bytes"] > liger["total_bytes"] + 4 * 2048 * 128_256 * 2


def test_rows_beyond_the_model_and_cards_without_bfloat16_are_told(capsys: Any) -> None:
    asked = ["--train", "lora", "--machine", "rtx-2080-ti", "--batch-size", "1"]
    notes = estimated(capsys, "gpt2", *asked)["notes"]
    assert "the model was made for 1,024 tokens of context" in notes
    assert any(note.startswith("no bfloat16 before Ampere") for note in notes)


def test_unsloth_counts_layers_between_its_checkpoints_without_a_word_more(capsys: Any) -> None:
    asked = ["llama-3-8b", *CARD, "--train", "lora", "--stack", "unsloth"]
    assert main(["estimate", *asked, "--checkpoint-every", "4"]) == 0
    capsys.readouterr()


def test_adapters_on_fp8_are_trained_by_transformers_5(capsys: Any) -> None:
    """``FP8LinearFunction`` has a backward pass, for which one matrix is made 16 bits wide."""
    asked = ["llama-3-8b", *CARD, "--train", "lora", "--quant"]
    packed, half = (estimated(capsys, *asked, quant)["total_bytes"] for quant in ("fp8", "bf16"))
    assert packed < half - 6 * GIB


def test_heads_that_both_splits_divide_together_are_computed(capsys: Any) -> None:
    asked = ["llama-3-8b", *CARD, "--train", "lora", "--tensor", "4", "--sequence", "8"]
    assert estimated(capsys, *asked)["total_bytes"]


@pytest.mark.parametrize(("gigabytes", "tokens"), [(48, 7_385), (80, 48_447)])
def test_logits_that_accelerate_widens_fill_a_card_at_the_lengths_of_before(
    gigabytes: int, tokens: int
) -> None:
    """The same page, 70B before the cut cross-entropy: what is allocated leaves a tenth at most."""
    workload = TrainingWorkload(
        rank=32,
        num_layers=None,
        batch_size=1,
        max_seq_length=tokens,
        grad_checkpoint=1,
        optimizer="adamw-8bit",
        quantized="nf4-double",
    )
    llama = model("Meta-Llama-3-70B")
    copies = Copies(in_place=True, width=2, converts_outputs=True)
    settings = replace(settings_for(Stack("unsloth"), workload, llama), copies=copies)
    needed = peak(training_terms(llama, workload, settings))[1]
    assert 0.9 * gigabytes * GIB < needed < gigabytes * GIB


@pytest.mark.parametrize("words", [[], ["--devices", "2", "--fsdp", "full"]])
def test_the_vision_tower_is_loaded_with_the_text_model(words: list[str], capsys: Any) -> None:
    """``AutoModelForCausalLM`` makes ``Gemma3ForConditionalGeneration`` (transformers 5.24)."""
    asked = ["gemma-3-4b", "--machine", "2xa100-sxm4-80gb", "--engine", "transformers"]
    held = terms_of(estimated(capsys, *asked), "always")["weights"]
    found = estimated(capsys, *asked, "--train", "lora", *words)
    shards = 2 if words else 1
    assert terms_of(found, "always")["weights"] == pytest.approx(held / shards, abs=2)
    adapters = terms_of(found, "always")["adapters"] + terms_of(found, "always")["optimizer_states"]
    state = found["sharding"]["device_state_bytes"]
    assert state >= held / shards + adapters


def test_gemma_2_keeps_the_tanh_of_its_logits_and_of_its_scores(capsys: Any) -> None:
    """Of 256,000 logits a token; and of 16 heads' scores of all pairs of tokens in 42 layers."""
    gemma = model("gemma-2-9b")
    plain = replace(gemma, model_type="gemma")
    workload = TrainingWorkload(num_layers=None, batch_size=1, max_seq_length=1024)
    eager = replace(workload, attention="materialised")
    for asked, kept in (
        (workload, 2 * 256_000 * 1024),
        (eager, 2 * 256_000 * 1024 + 42 * 2 * 16 * 1024**2),
    ):
        with_caps, without = (
            phase_totals(training_terms(one, asked, settings_for(Stack(), asked, plain)))["forward"]
            for one in (gemma, plain)
        )
        assert with_caps - without == kept


def test_mlx_lm_trains_on_the_weights_as_they_are_stored_wherever_it_runs(capsys: Any) -> None:
    """On a CPU uma's own trainer alone may make float32 of them."""
    asked = ["llama-3-8b", "--train", "lora", "--engine", "mlx", "--max-seq-length", "512"]
    here, mac = (
        terms_of(estimated(capsys, *asked, *words), "always")
        for words in ([], ["--machine", "mac-studio-m3-ultra-512"])
    )
    assert here["weights"] == mac["weights"] < 5 * GIB
