"""``uma estimate --train``: sharding, measures, and what is explained instead of computed."""

import json
from typing import Any

import pytest

from uma.cli import main
from uma.units import GIB, MIB

FULL_8 = ["llama-3-8b", "--train", "full", "--machine", "8xh100", "--devices", "8"]
MAC = ["--machine", "mac-studio-m2-ultra-192"]
CARD = ["--machine", "rtx-4090"]
PARAMETERS = 8_030_261_248


def estimated(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    main(["estimate", *arguments, "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("options", "bytes_each", "sent"),
    [
        # 2 bytes of weights, 2 of gradients, 12 of float32 copies and moments (ZeRO, section 3.1).
        # DeepSpeed's first stages have an all-reduce of gradients, and gather weights after it.
        (["--zero-stage", "1"], 2 + 2 + 12 / 8, {"gradients": 4, "parameters": 2}),
        (["--zero-stage", "2"], 2 + 14 / 8, {"gradients": 4, "parameters": 2}),
        (["--zero-stage", "3"], 16 / 8, {"parameters": 4, "gradients": 2}),
    ],
)
def test_stages_split_state_as_zero_does(
    options: list[str], bytes_each: float, sent: dict[str, int], capsys: Any
) -> None:
    found = estimated(capsys, *FULL_8, *options)["sharding"]
    assert found["device_state_bytes"] == pytest.approx(bytes_each * PARAMETERS, rel=1e-6)
    assert found["sent_bytes"] == {
        cause: pytest.approx(width * PARAMETERS * 7 / 8, rel=1e-6) for cause, width in sent.items()
    }


def test_offload_moves_state_to_the_host_and_to_the_disk(capsys: Any) -> None:
    three = [*FULL_8, "--zero-stage", "3"]
    optimizer = estimated(capsys, *three, "--offload-optimizer", "host")["sharding"]
    # Of a billion numbers each device has float32 weights and moments; and pinned, in powers of
    # two, gradients in 32 bits, a sub-group of 10^9 and the rest, and in 16.
    wide, narrow = 8 * (4 * GIB + 16 * MIB), 8 * 2 * GIB
    assert optimizer["host_bytes"] == pytest.approx(12 * PARAMETERS + wide + narrow, rel=1e-6)
    both = ["--offload-optimizer", "disk", "--offload-parameters", "host"]
    found = estimated(capsys, *three, *both)["sharding"]
    buffers = 4 * 4 * PARAMETERS  # four of a sub-group, which is all that a device has
    assert found["host_bytes"] == pytest.approx(2 * narrow + buffers, rel=1e-6)
    assert found["disk_bytes"] == pytest.approx(16 * PARAMETERS, rel=1e-6)
    assert found["device_state_bytes"] == 0
    assert set(found["sent_bytes"]) == {"parameters", "gradients", "host", "disk"}


def test_hybrid_sharding_has_groups_of_one_machine(capsys: Any) -> None:
    arguments = ["llama-3-8b", "--train", "full", "--machine", "4xa100-80gb", "--devices", "8"]
    found = estimated(capsys, *arguments, "--fsdp", "hybrid")["sharding"]
    assert found["shard_group"] == 4
    whole = estimated(capsys, *arguments, "--fsdp", "full")["sharding"]
    assert found["device_state_bytes"] == pytest.approx(2 * whole["device_state_bytes"], rel=1e-6)
    assert "groups" in found["sent_bytes"]


def test_tensor_pipeline_and_sequence_parallelism_split_a_step(capsys: Any) -> None:
    arguments = ["llama-3-8b", "--train", "full", "--machine", "8xh100", "--grad-checkpoint"]
    whole = estimated(capsys, *arguments)
    for option, sent in (("--tensor", "tensor"), ("--pipeline", "pipeline")):
        found = estimated(capsys, *arguments, option, "4")
        assert found["sharding"]["devices"] == 4
        assert sent in found["sharding"]["sent_bytes"]
        assert found["total_bytes"] < whole["total_bytes"] / 2
    found = estimated(capsys, *arguments, "--sequence", "4", "--zero-stage", "3")
    assert found["sharding"]["device_state_bytes"] == pytest.approx(16 * PARAMETERS / 4, rel=1e-6)


def test_macs_share_a_batch_or_each_layer_too(capsys: Any) -> None:
    arguments = ["llama-3-8b", "--train", "full", "--num-layers", "-1", *MAC, "--grad-checkpoint"]
    alone = estimated(capsys, *arguments, "--batch-size", "1")
    shared = estimated(capsys, *arguments, "--devices", "4")
    sharded = estimated(capsys, *arguments, "--devices", "4", "--fsdp", "full")
    gradients = 2 * 2 * shared["trainable_parameters"] * 3 // 4  # an all-reduce of 16 bits
    assert shared["sharding"]["sent_bytes"] == {"gradients": gradients}
    assert shared["total_bytes"] > alone["total_bytes"]
    assert sharded["total_bytes"] < shared["total_bytes"] / 2
    assert any("JACCL" in note for note in sharded["notes"])
    # Without checkpointing what is gathered stays for the backward pass: gathered once.
    plain = estimated(capsys, *arguments[:-1], "--devices", "4", "--fsdp", "full")
    once, twice = (found["sharding"]["sent_bytes"]["parameters"] for found in (plain, sharded))
    assert (once, twice) == (2 * PARAMETERS * 3 // 4, 2 * 2 * PARAMETERS * 3 // 4)


def test_the_text_says_where_state_lies_and_what_is_sent(capsys: Any) -> None:
    main(["estimate", *FULL_8, "--zero-stage", "3", "--offload-optimizer", "host"])
    out = capsys.readouterr().out
    assert (
        "state of one of 8 devices (data 8, ZeRO 3): 1.87 GiB on it, 17.23 GiB on the host" in out
    )
    assert "of all devices: 137.87 GiB on the host" in out
    assert "each device sends for an update: parameters 26.18 GiB, gradients 13.09 GiB" in out


def test_a_host_that_is_too_small_exceeds(capsys: Any) -> None:
    arguments = [*FULL_8, "--zero-stage", "3", "--offload-optimizer", "host", "--grad-checkpoint"]
    roomy = estimated(capsys, *arguments, "--host-ram", "256GB")
    small = estimated(capsys, *arguments, "--host-ram", "64GB")
    assert (roomy["verdict"], small["verdict"]) == ("fits", "exceeds")
    assert any("which leaves 60.00 GiB" in note for note in small["notes"])
    assert small["largest"]["batch_size"] is None
    main(["estimate", *arguments, "--host-ram", "64GB"])
    assert (
        "exceeds: the host 137.87 GiB of 60.00 GiB, 77.87 GiB too much" in capsys.readouterr().out
    )


def test_what_the_host_does_not_hold_is_not_advised(capsys: Any) -> None:
    """18 bytes a parameter of 8e9 are 135 GiB."""
    options = ["--train", "full", *CARD, "--host-ram", "32GB", "--grad-checkpoint"]
    found = estimated(capsys, "llama-3-8b", *options, "--batch-size", "1")
    assert not found["measures_suffice"]
    assert not any("host" in measure["name"] for measure in found["measures"])


def test_a_stack_is_not_advised_what_it_does_not_do(capsys: Any) -> None:
    options = ["--train", "full", "--machine", "2xrtx-3090", "--host-ram", "512GB"]
    for stack, words in (
        ("unsloth", {"--devices", "--zero-stage"}),
        ("torchtune", {"--zero-stage"}),
    ):
        found = estimated(capsys, "llama-3-8b", *options, "--stack", stack)
        assert found["measures"]
        assert words.isdisjoint(word for one in found["measures"] for word in one["options"])


def test_float32_weights_are_not_advised_to_be_quantized(capsys: Any) -> None:
    found = estimated(capsys, "llama-3-8b", "--train", "lora", *CARD, "--precision", "mixed")
    assert not any("4 bits" in measure["name"] for measure in found["measures"])


def test_the_largest_of_our_own_trainer_fits_as_its_rows_are_padded(capsys: Any) -> None:
    """Positions are shared by a batch, and rows are rounded up to a quarter of a power of two."""
    arguments = ["phi-3-mini", "--train", "lora", "--machine", "mac-mini-m4-16", "--trainer", "uma"]
    largest = estimated(capsys, *arguments)["largest"]
    for option, name in (("--max-seq-length", "max_seq_length"), ("--batch-size", "batch_size")):
        assert estimated(capsys, *arguments, option, str(largest[name]))["verdict"] != "exceeds"


def test_the_end_of_a_search_is_not_said_to_be_the_largest(capsys: Any) -> None:
    main(["estimate", "llama-3.2-1b", "--train", "lora", *MAC, "--max-seq-length", "2"])
    printed = capsys.readouterr().out
    assert "rows of 2 tokens," in printed
    assert "batch_size 4,096 or more" in printed
    assert "rank 4,096 or more" in printed


@pytest.mark.parametrize(
    "options",
    [
        ["--train", "lora", "--machine", "rtx-3060", "--optimizer", "adamw", "--batch-size", "8"],
        ["--train", "dora", "--machine", "2xrtx-3090", "--grad-checkpoint", "--rank", "256"],
        ["--train", "full", "--machine", "4xrtx-4090", "--host-ram", "512GB", "--batch-size", "1"],
        ["--train", "full", "--machine", "rtx-4090", "--host-ram", "256GB", "--batch-size", "1"],
        [
            *["--train", "full", "--machine", "2xh100", "--devices", "2", "--zero-stage", "3"],
            *["--offload-optimizer", "host", "--grad-checkpoint", "--host-ram", "64GB"],
        ],
    ],
)
def test_measures_are_options_that_the_command_takes_and_that_make_it_fit(
    options: list[str], capsys: Any
) -> None:
    arguments = ["llama-3-8b", *options]
    found = estimated(capsys, *arguments)
    assert found["verdict"] == "exceeds"
    assert found["measures_suffice"]
    taken = [word for measure in found["measures"] for word in measure["options"]]
    after = estimated(capsys, *arguments, *taken)
    assert after["verdict"] in ("fits", "tight")
    saved = sum(measure["saves_bytes"] for measure in found["measures"])
    assert after["total_bytes"] == found["total_bytes"] - saved


def test_where_nothing_helps_it_is_said(capsys: Any) -> None:
    arguments = ["llama-3-70b", "--train", "lora", *CARD]
    assert not estimated(capsys, *arguments)["measures_suffice"]
    main(["estimate", *arguments])
    assert "what helps, but is not enough:" in capsys.readouterr().out


def test_the_largest_model_trains_and_the_next_ones_do_not(capsys: Any) -> None:
    asked = ["--train", "lora", *CARD, "--quant", "nf4", "--grad-checkpoint", "--batch-size", "1"]
    name = estimated(capsys, "llama-3-8b", *asked, "--largest-model")["largest"]["model"]
    found = estimated(capsys, name, *asked)
    assert found["verdict"] in ("fits", "tight")
    assert found["trainable_parameters"] > 0
    assert estimated(capsys, "llama-3-70b", *asked)["verdict"] == "exceeds"


def test_mixed_precision_keeps_float32_weights(capsys: Any) -> None:
    arguments = ["llama-3-8b", "--train", "full", "--machine", "8xh100", "--mem-kind", "allocated"]
    plain, mixed = (
        estimated(capsys, *arguments, "--grad-checkpoint", "--precision", precision)
        for precision in ("16-bit", "mixed")
    )
    assert mixed["phases"]["optimizer_bytes"] == pytest.approx(
        2 * plain["phases"]["optimizer_bytes"], rel=0.001
    )


@pytest.mark.parametrize("stack", ["torchtune", "unsloth"])
def test_a_stack_of_its_own_kernels_needs_less_than_trainer(stack: str, capsys: Any) -> None:
    arguments = ["llama-3-8b", "--train", "lora", *CARD, "--quant", "nf4", "--grad-checkpoint"]
    plain, other = (
        estimated(capsys, *arguments, "--batch-size", "1", "--stack", name)
        for name in ("trainer", stack)
    )
    assert other["total_bytes"] < plain["total_bytes"]
    assert (plain["stack"], other["stack"]) == ("trainer", stack)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ([*CARD, "--fsdp", "full"], "FSDP on one device shards nothing"),
        ([*CARD, "--zero-stage", "2"], "ZeRO stage 2 on one device shards nothing"),
        ([*CARD, "--zero-stage", "3", "--fsdp", "full"], "two programs for the same"),
        ([*CARD, "--devices", "4", "--fsdp", "hybrid"], "is no hybrid"),
        ([*CARD, "--devices", "4", "--fsdp", "full", "--shard-group", "2"], "--fsdp hybrid"),
        ([*CARD, "--devices", "4", "--shard-group", "2"], "give --fsdp too"),
        ([*CARD, "--offload-optimizer", "host"], "a part of ZeRO and of FSDP"),
        ([*CARD, "--zero-stage", "2", "--offload-optimizer", "disk"], "offload to the host"),
        ([*CARD, "--zero-stage", "2", "--offload-parameters", "host"], "ZeRO stage 3 only"),
        (
            [*CARD, "--fsdp", "full", "--devices", "2", "--offload-optimizer", "host"],
            "offloads parameters, gradients and optimizer states together",
        ),
        ([*CARD, "--tensor", "3"], "8 key-value heads are not divisible"),
        ([*CARD, "--sequence", "5"], "32 attention heads are not divisible"),
        ([*CARD, "--pipeline", "64"], "the model has 32 layers"),
        (
            [*CARD, "--pipeline", "2", "--devices", "2", "--zero-stage", "2"],
            "keep whole gradients between micro-batches",
        ),
        ([*CARD, "--quant", "nf4", "--tensor", "2"], "packed whole"),
        ([*CARD, "--quant", "gptq", "--train", "dora"], "PEFT has no DoRA on gptq"),
        ([*CARD, "--quant", "mxfp4"], "no adapters on mxfp4 weights"),
        ([*CARD, "--train", "full", "--quant", "nf4"], "quantized weights have no gradient"),
        ([*CARD, "--train", "full", "--rank", "8"], "that of adapters"),
        ([*CARD, "--num-layers", "0", "--optimizer", "adamw-8bit"], "would have no states"),
        ([*CARD, "--targets", "embed"], "no matrix is named embed"),
        ([*CARD, "--targets", " , "], "names nothing"),
        ([*CARD, "--targets", "q_proj,foo"], "no matrix is named foo"),
        ([*CARD, "--train", "full", "--targets", "q_proj"], "--train full has none"),
        ([*CARD, "--bits", "4", "--quant", "nf4"], "give one of them"),
        ([*CARD, "--mode", "mxfp4"], "is of MLX's formats"),
        ([*CARD, "--group-size", "32"], "--group-size 32 is of MLX's formats"),
        ([*CARD, "-cram", "8192"], "--cache-ram is an option of generation"),
        ([*MAC, "--engine", "transformers"], "Mac Studio M2 Ultra, 192 GiB has none"),
        ([*CARD, "--checkpoint-every", "4"], "give --grad-checkpoint too"),
        ([*CARD, "--grad-checkpoint", "--checkpoint-every", "40"], "the model has 32"),
        ([*CARD, "--bits", "6"], "torch trains on 4"),
        ([*CARD, "--precision", "mixed", "--quant", "nf4"], "which nf4 ones are not"),
        ([*CARD, "--trainer", "uma"], "runs on MLX"),
        ([*CARD, "--packing"], "give --data too"),
        ([*CARD, "--context", "4096"], "training has --max-seq-length"),
        ([*CARD, "--kv-bits", "8"], "an option of generation"),
        ([*CARD, "--stack", "unsloth", "--devices", "2"], "Unsloth trains on one device"),
        (
            [*CARD, "--stack", "torchtune", "--devices", "2", "--zero-stage", "3"],
            "torchtune shards with FSDP",
        ),
        ([*MAC, "--stack", "unsloth"], "is of torch"),
        ([*MAC, "--quant", "nf4"], "a format of CUDA's libraries"),
        ([*MAC, "--quant", "int8"], "a format of CUDA's libraries"),
        ([*MAC, "--optimizer", "paged-adamw"], "needs CUDA"),
        ([*MAC, "--zero-stage", "2", "--devices", "2"], "ZeRO is DeepSpeed's"),
        ([*MAC, "--zero-stage", "2", "--offload-optimizer", "host"], "a Mac has one memory"),
        ([*MAC, "--tensor", "2"], "on MLX training is data parallel"),
        ([*MAC, "--fsdp", "full", "--devices", "2"], "packed integers"),
        ([*MAC, "--bits", "16", "--fsdp", "full", "--devices", "2"], "as much as full training"),
        ([*MAC, "--devices", "3"], "not divisible by 3 devices"),
        ([*MAC, "--loss", "fused"], "--trainer uma computes them in slices"),
        ([*MAC, "--trainer", "uma", "--loss", "sliced"], "leave --loss out"),
        ([*MAC, "--trainer", "uma", "--devices", "2"], "runs on one Mac"),
        ([*MAC, "--mem-kind", "device"], "is torch's"),
        ([*MAC, "--grad-checkpoint", "--checkpoint-every", "4"], "checkpoints every layer"),
        ([*MAC, "--precision", "mixed"], "is torch's autocast"),
        ([*MAC, "--train", "dora", "--bits", "6"], "wrong for 6 bits"),
        ([*MAC, "--train", "full", "--bits", "4"], "quantized weights have no gradient"),
    ],
)
def test_what_means_nothing_is_explained(options: list[str], reason: str, capsys: Any) -> None:
    train = [] if "--train" in options else ["--train", "lora"]
    assert main(["estimate", "llama-3-8b", *train, *options]) == 2
    assert reason in " ".join(capsys.readouterr().err.split())


def test_what_is_asked_for_stands_at_the_head_where_it_is_not_the_default(capsys: Any) -> None:
    words = ["estimate", "llama-3.2-1b", "--train", "lora", *CARD]
    main(words)
    assert "with " not in capsys.readouterr().out.partition("fits:")[0]
    said = {
        "--loss": ("sliced", "the loss in slices"),
        "--precision": ("mixed", "mixed precision"),
        "--grad-accumulation-steps": ("4", "4 batches for an update"),
        "--attention": ("materialised", "materialised attention"),
        "--fused-kernels": ("liger", "Liger kernels"),
        "--targets": ("q_proj,v_proj", "adapters on q_proj and v_proj"),
        "--mem-kind": ("reserved", "memory reserved by torch"),
        "--quant": ("fp16", "float16"),
        "--lora-dropout": ("", "dropout before adapters"),
    }
    for option, (value, text) in said.items():
        main([*words, option, *([value] if value else [])])
        assert f"\nwith {text}\n" in capsys.readouterr().out, option
    main([*words, "--attention", "fused", "--lora-dropout"])
    assert "\nwith fused attention, dropout before adapters\n" in capsys.readouterr().out
    assert estimated(capsys, *words[1:], "--quant", "fp16")["workload"]["dtype"] == "float16"


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_phases_stand_in_the_order_of_a_step(stage: str, capsys: Any) -> None:
    found = estimated(capsys, *FULL_8, "--zero-stage", stage)
    order = [f"{name}_bytes" for name in ("forward", "backward", "optimizer", "validation", "save")]
    assert list(found["phases"]) == order
    main(["estimate", *FULL_8, "--zero-stage", stage])
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("phases: ")]
    assert [part.split()[0] for part in line[8:].split(", ")] == [name[:-6] for name in order]


def test_float16_is_refused_where_nothing_trains_it(capsys: Any) -> None:
    """torch 2.13, ``amp/grad_scaler.py``: ``Attempting to unscale FP16 gradients.``"""
    words = ["estimate", "llama-3.2-1b", "--machine", "h100", "--quant", "fp16", "--train"]
    for options, reason in (
        (["full"], "torch's GradScaler refuses gradients in float16"),
        (["full", "--stack", "trainer-2024"], "torch's GradScaler refuses gradients in float16"),
        (["full", "--devices", "2", "--fsdp", "full"], "torch's GradScaler refuses"),
        (["full", "--stack", "unsloth"], "Unsloth makes float32 of float16 weights"),
        (["full", "--stack", "torchtune"], "torchtune has no float16"),
        (["lora", "--stack", "torchtune"], "torchtune has no float16"),
    ):
        assert main([*words, *options]) == 2, options
        assert reason in capsys.readouterr().err


def test_float16_is_trained_with_float32_weights_or_adapters_and_where_no_loss_is_scaled(
    capsys: Any,
) -> None:
    words = ["llama-3.2-1b", "--machine", "h100", "--quant", "fp16", "--train"]
    for options, scaled in (
        (["full", "--precision", "mixed"], True),
        (["full", "--devices", "2", "--zero-stage", "3"], True),
        (["lora"], True),
        (["full", "--stack", "litgpt"], False),
        (["full", "--precision", "pure"], False),
    ):
        found = estimated(capsys, *words, *options)
        assert any("no loss is scaled" in note for note in found["notes"]) != scaled, options


def test_a_card_without_bfloat16_says_what_float16_asks_for(capsys: Any) -> None:
    words = ["llama-3.2-1b", "--machine", "v100-sxm2-32gb", "--train", "full"]
    for options, refused in (([], True), (["--precision", "mixed"], False)):
        notes = " ".join(estimated(capsys, *words, *options)["notes"])
        assert "no bfloat16 before Ampere" in notes
        assert ("GradScaler" in notes) == refused


def test_it_is_said_where_mlx_lm_has_no_module_for_a_model(capsys: Any) -> None:
    missing = "mlx-lm 0.32.2 has no module for falcon"
    for machine, said in ((MAC, True), (CARD, False)):
        found = estimated(capsys, "falcon-7b", "--train", "lora", *machine)
        assert (missing in found["notes"]) is said


def test_our_own_trainer_is_estimated_by_its_own_step(capsys: Any) -> None:
    arguments = ["llama-3.2-3b", "--train", "lora", *MAC]
    main(["estimate", *arguments, "--trainer", "uma"])
    assert "under uma lora train" in capsys.readouterr().out
    theirs, ours = (estimated(capsys, *arguments, "--trainer", name) for name in ("mlx_lm", "uma"))
    assert ours["trainer"] == "uma"
    assert ours["total_bytes"] < theirs["total_bytes"] / 2
    assert ours["largest"]["max_seq_length"] > 2 * theirs["largest"]["max_seq_length"]


def test_full_training_of_a_name_takes_its_weights_in_16_bits(capsys: Any) -> None:
    found = estimated(capsys, "llama-3.2-1b", "--train", "full", *MAC, "--batch-size", "1")
    assert found["workload"]["quantized"] is None
    assert any("only the last 16 layers are trained" in note for note in found["notes"])


def test_exact_traces_the_step_of_mlx_lms_own_code(capsys: Any) -> None:
    """Without weights: base, adapters and states to the byte, the step of 30 layers near."""
    pytest.importorskip("mlx.core")
    words = ["smollm2-135m", "--train", "lora", "--engine", "mlx", "--max-seq-length", "256"]
    found = estimated(capsys, *words, "--trainer", "uma", "--exact")
    closed, traced = (
        {(term["name"], term["phase"]): term["size_bytes"] for term in terms}
        for terms in (found["terms"], found["traced"])
    )
    for name in ("weights", "adapters", "optimizer_states"):
        assert traced[name, "always"] == closed[name, "always"], name
    step = ("activations", "backward")
    assert traced[step] == pytest.approx(closed[step], rel=0.06)


def test_exact_is_for_what_mlx_trains(capsys: Any) -> None:
    assert main(["estimate", "llama-3-8b", "--train", "lora", *CARD, "--exact"]) == 2
    assert "which is not estimated on GeForce RTX 4090" in capsys.readouterr().err
