"""What ``uma estimate --train`` says would make a training fit."""

import json
from typing import Any

import pytest

from uma.cli import main

CHECKPOINTED = ["--batch-size", "1", "--grad-checkpoint"]
OFFLOADED = ["--zero-stage", "3", "--offload-optimizer", "host", "--offload-parameters", "host"]


def estimated(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    main(["estimate", *arguments, "--json"])
    return json.loads(capsys.readouterr().out)


def advised(capsys: Any, *arguments: str) -> dict[str, tuple[str, ...]]:
    """The measures, which make it fit, and do as options of the same command."""
    found = estimated(capsys, *arguments)
    assert found["measures_suffice"]
    taken = [word for one in found["measures"] for word in one["options"]]
    assert estimated(capsys, *arguments, *taken)["verdict"] == "fits"
    return {one["name"]: tuple(one["options"]) for one in found["measures"]}


@pytest.mark.parametrize(
    ("model", "machine"), [("llama-3-8b", "rtx-4090"), ("qwen3-4b", "mac-mini-m4-16")]
)
def test_nothing_is_advised_that_shorter_rows_do_without(
    model: str, machine: str, capsys: Any
) -> None:
    words = ["--train", "lora", "--machine", machine, "--batch-size", "1"]
    arguments = [model, *words, "--max-seq-length", "131072"]
    found = advised(capsys, *arguments)
    assert "shorter rows" in found
    for left_out in found:
        rest = [word for name, options in found.items() if name != left_out for word in options]
        assert estimated(capsys, *arguments, *rest)["verdict"] != "fits", left_out


def test_what_did_not_help_at_first_is_asked_again(capsys: Any) -> None:
    """The backward pass of a layer's experts needs most, until rows are short."""
    words = ["--train", "lora", "--machine", "rtx-4090", "--host-ram", "64GB", *CHECKPOINTED]
    found = estimated(capsys, "deepseek-v3", *words, *OFFLOADED, "--max-seq-length", "512")
    names = [measure["name"] for measure in found["measures"]]
    assert names[-2:] == ["shorter rows", "loss in slices"]


def test_an_8_bit_optimizer_gives_way_to_what_it_does_not_go_with(capsys: Any) -> None:
    """bitsandbytes' states neither shard under FSDP nor lie on a host."""
    full = ["llama-3-8b", "--train", "full", "--optimizer", "adamw", *CHECKPOINTED]
    assert advised(capsys, *full, "--machine", "8xrtx-4090") == {
        "sharding": ("--devices", "8", "--fsdp", "full")
    }
    host = advised(capsys, *full, "--machine", "rtx-4090", "--host-ram", "256GB")
    assert "optimizer on the host" in host
    assert "8-bit optimizer" not in host
    sharded = ["--devices", "8", "--fsdp", "full", "--machine", "8xh100"]
    large = estimated(capsys, "llama-3-70b", *full[1:], *sharded)
    assert large["verdict"] != "fits"
    assert "8-bit optimizer" not in [measure["name"] for measure in large["measures"]]


def test_cards_that_stand_idle_join_the_users_own_sharding(capsys: Any) -> None:
    words = ["--train", "lora", "--machine", "2xrtx-4090", "--quant", "nf4-double", *CHECKPOINTED]
    words += ["--zero-stage", "2", "--offload-optimizer", "host", "--host-ram", "2TB"]
    found = advised(capsys, "deepseek-v2-lite", *words, "--max-seq-length", "128", "--rank", "64")
    assert found == {"sharding": ("--devices", "2", "--zero-stage", "3")}


def test_parameters_go_to_the_disk_where_the_host_is_too_small(capsys: Any) -> None:
    words = ["--train", "lora", "--machine", "8xh100", "--host-ram", "1TB", "--devices", "8"]
    arguments = ["deepseek-v3", *words, *OFFLOADED, *CHECKPOINTED]
    assert list(advised(capsys, *arguments)) == ["optimizer and parameters on the disk"]
    (measure,) = estimated(capsys, *arguments)["measures"]
    assert measure["saves_bytes"] == 0
    assert measure["host_saves_bytes"] > 1200 << 30
    main(["estimate", *arguments])
    assert "saves 1,242.42 GiB on the host" in capsys.readouterr().out


def test_a_base_that_has_no_room_on_the_host_goes_to_its_disk_at_once(capsys: Any) -> None:
    words = ["--train", "lora", "--machine", "rtx-4090", "--host-ram", "64GB", "--batch-size", "1"]
    assert "optimizer and parameters on the disk" in advised(capsys, "llama-3-70b", *words)


@pytest.mark.parametrize(
    ("model", "arguments", "advice"),
    [
        (
            "llama-3-8b",
            ["--machine", "mac-mini-m4-16", "--bits", "8", "--trainer", "uma"],
            ("--bits", "4"),
        ),
        (
            "phi-4",
            ["--machine", "rtx-4060-ti-16gb", "--quant", "int8", *CHECKPOINTED],
            ("--quant", "nf4"),
        ),
        (
            "phi-4",
            ["--machine", "rtx-3060", "--quant", "nf4", *CHECKPOINTED, "--loss", "sliced"],
            ("--quant", "nf4-double"),
        ),
    ],
)
def test_a_base_in_few_bits_is_advised_fewer(
    model: str, arguments: list[str], advice: tuple[str, ...], capsys: Any
) -> None:
    options = advised(capsys, model, "--train", "lora", *arguments)
    assert advice in options.values()


def test_paged_states_are_advised_in_8_bits(capsys: Any) -> None:
    words = ["--train", "full", "--machine", "dgx-spark", "--optimizer", "paged-adamw"]
    found = advised(capsys, "phi-4", *words, *CHECKPOINTED)
    assert found == {"8-bit optimizer": ("--optimizer", "paged-adamw-8bit")}


def test_deepspeed_reaches_the_disk_where_the_host_is_too_small_for_fsdp(capsys: Any) -> None:
    words = ["--train", "lora", "--machine", "8xh100", "--host-ram", "1TB", "--batch-size", "1"]
    disk = "--zero-stage 3 --offload-optimizer disk --offload-parameters disk"
    found = advised(capsys, "deepseek-v3", *words)
    assert found["optimizer and parameters on the disk"] == ("--devices", "8", *disk.split())
    assert "sharding" not in found  # FSDP's, which does not go with it


def test_deepspeed_takes_the_place_of_fsdp_that_accumulates_whole_gradients(capsys: Any) -> None:
    """In ``no_sync`` each device sums gradients of all 14.7 billion parameters, on the card."""
    words = ["--train", "full", "--machine", "2xrtx-4090", "--host-ram", "1TB", "--batch-size", "4"]
    found = advised(capsys, "phi-4", *words)
    assert "a smaller batch, with accumulation" in found
    assert any("--zero-stage" in options for options in found.values())


def test_states_of_bitsandbytes_are_sharded_by_deepspeed(capsys: Any) -> None:
    words = ["--train", "full", "--machine", "8xrtx-4090", "--host-ram", "256GB"]
    words += ["--batch-size", "1", "--optimizer", "paged-adamw"]
    found = advised(capsys, "mistral-7b", *words)
    assert found["sharding"] == ("--devices", "8", "--zero-stage", "3")


@pytest.mark.parametrize(
    ("model", "machine", "optimizer"),
    [("qwen2.5-72b", "8xh100", "adamw-8bit"), ("mistral-7b", "rtx-4090", "paged-adamw")],
)
def test_states_of_bitsandbytes_give_way_to_those_that_go_to_the_host(
    model: str, machine: str, optimizer: str, capsys: Any
) -> None:
    words = ["--train", "full", "--machine", machine, "--host-ram", "2TB", "--batch-size", "1"]
    found = advised(capsys, model, *words, "--optimizer", optimizer)
    (options,) = (options for options in found.values() if "--offload-optimizer" in options)
    assert options[:2] == ("--optimizer", "adamw")


@pytest.mark.parametrize(("model", "length"), [("mixtral-8x7b", "8192"), ("llama-3-70b", "2048")])
def test_4_bit_weights_go_to_the_host_of_one_card_under_fsdp(
    model: str, length: str, capsys: Any
) -> None:
    """PEFT 0.21, ``docs/source/accelerate/fsdp.md``; DeepSpeed does not take them there."""
    words = ["--train", "qlora", "--machine", "rtx-4090", "--host-ram", "1TB", *CHECKPOINTED]
    found = advised(capsys, model, *words, "--max-seq-length", length)
    assert list(found.values()) == [("--fsdp", "full", *OFFLOADED[2:])]


@pytest.mark.parametrize(
    "words",
    [
        "falcon-7b --train full --machine rtx-4060-8gb --batch-size 3 --max-seq-length 512 "
        "--optimizer sgd --host-ram 32GB",
        "qwen3.5-35b-a3b --train full --machine 2xrtx-3090 --grad-checkpoint --stack litgpt",
    ],
)
def test_each_measure_saves_something_where_it_stands(words: str, capsys: Any) -> None:
    """Checkpoints save nothing of an update, but where that is on the host they do."""
    found = estimated(capsys, *words.split())
    assert found["measures"]
    for measure in found["measures"]:
        assert measure["saves_bytes"] > 0 or measure["host_saves_bytes"] > 0, measure["name"]
    taken = [word for one in found["measures"] for word in one["options"]]
    after = estimated(capsys, *words.split(), *taken)
    assert (after["verdict"] == "fits") == found["measures_suffice"]


def test_the_update_on_the_host_is_that_of_the_optimizer(capsys: Any) -> None:
    words = ["--train", "full", "--machine", "rtx-4090", "--host-ram", "256GB", *CHECKPOINTED]
    found = estimated(capsys, "llama-3-8b", *words, "--optimizer", "sgd")
    assert any(measure["cost"].endswith("sgd on the host") for measure in found["measures"])


def test_the_users_own_fsdp_is_kept(capsys: Any) -> None:
    """The command line takes ``--fsdp`` or ``--zero-stage``."""
    words = ["--train", "lora", "--machine", "8xh100", "--host-ram", "1TB", "--batch-size", "1"]
    arguments = ["deepseek-v3", *words, "--devices", "8", "--fsdp", "full"]
    found = estimated(capsys, *arguments)
    assert not found["measures_suffice"]
    taken = [word for one in found["measures"] for word in one["options"]]
    assert "--zero-stage" not in taken
    assert estimated(capsys, *arguments, *taken)["verdict"] == "exceeds"


def test_our_own_trainer_is_not_advised_where_it_refuses_an_option(capsys: Any) -> None:
    words = ["--train", "lora", "--engine", "mlx", "--machine", "mac-mini-m4-16"]
    words += ["--batch-size", "1", "--max-seq-length", "8192"]
    assert ("--trainer", "uma") in advised(capsys, "llama-3-8b", *words).values()
    found = advised(capsys, "llama-3-8b", *words, "--attention", "materialised")
    assert not any("--trainer" in options for options in found.values())


def test_nothing_is_advised_where_the_weights_alone_take_too_much(capsys: Any) -> None:
    words = ["deepseek-v3", "--train", "lora", "--machine", "mac-studio-m2-ultra-192"]
    found = estimated(capsys, *words)
    assert not found["measures"]
    assert any("the weights alone take 351.67 GiB" in note for note in found["notes"])
    base = ["llama-3-70b", "--train", "lora", "--bits", "16", "--machine", "mac-studio-m4-max-64"]
    assert "a base in 4 bits" in advised(capsys, *base, "--batch-size", "1")


def test_weights_above_the_budget_and_within_the_limit_are_helped_to_be_tight(capsys: Any) -> None:
    words = ["internlm2-20b", "--train", "lora", "--machine", "mac-mini-m4-16"]
    words += ["--batch-size", "4", "--max-seq-length", "256"]
    found = estimated(capsys, *words)
    assert found["verdict"] == "exceeds"
    assert ["--trainer", "uma"] in [measure["options"] for measure in found["measures"]]
    assert estimated(capsys, *words, "--trainer", "uma")["verdict"] == "tight"
