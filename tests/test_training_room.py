"""``uma estimate --train``: the largest that fits, and what lies on a host, if there is one."""

import json
from typing import Any

import pytest

from uma.cli import main
from uma.units import GIB

LLAMA = 8_030_261_248
FULL = ["--train", "full", "--batch-size", "1", "--grad-checkpoint"]


def estimated(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    main(["estimate", *arguments, "--json"])
    return json.loads(capsys.readouterr().out)


def assert_largest_fits(capsys: Any, arguments: list[str], *names: str) -> None:
    """As an option of the same command it does, on device and host, and an eighth more does not."""
    largest = estimated(capsys, *arguments)["largest"]
    for name in names:
        option = f"--{name.replace('_', '-')}"
        for value, fits in ((largest[name], True), (largest[name] * 9 // 8 + 1, False)):
            found = estimated(capsys, *arguments, option, str(value))
            assert (found["verdict"] == "fits") is fits, (name, value)


def test_what_is_meant_for_a_host_stays_in_the_only_memory(capsys: Any) -> None:
    """Weights and gradients in 16 bits, two float32 states: 12 bytes a parameter, all of them."""
    found = estimated(
        capsys, "phi-4", *FULL, "--machine", "dgx-spark", "--optimizer", "paged-adamw"
    )
    assert found["verdict"] == "exceeds"
    state = found["sharding"]
    assert state["device_state_bytes"] == pytest.approx(12 * 14_659_507_200, rel=1e-3)
    assert (state["device_host_bytes"], state["host_bytes"]) == (0, 0)
    assert found["total_bytes"] > state["device_state_bytes"]
    assert not any("--host-ram" in note for note in found["notes"])


def test_inputs_that_unsloth_moves_to_a_host_stay_in_the_only_memory(capsys: Any) -> None:
    """Of 40 layers, 8 rows of 8,192 tokens, 5,120 wide, in 16 bits."""
    words = ["--train", "lora", "--stack", "unsloth", "--batch-size", "8"]
    words += ["--max-seq-length", "8192", "--mem-kind", "allocated"]
    spark, card = (
        estimated(capsys, "phi-4", *words, "--machine", name) for name in ("dgx-spark", "h200")
    )
    inputs = 2 * 40 * 8 * 8192 * 5120
    assert spark["total_bytes"] == card["total_bytes"] + inputs
    assert card["sharding"]["host_bytes"] == inputs
    assert any("the machine has one memory" in note for note in spark["notes"])
    arguments = ["phi-4", *words, "--machine", "dgx-spark"]
    assert_largest_fits(capsys, arguments, "batch_size", "max_seq_length")


def test_paged_states_stay_on_a_card_that_has_room(capsys: Any) -> None:
    """And only what it has no room for goes to the host."""
    arguments = ["llama-3-8b", *FULL, "--optimizer", "paged-adamw", "--host-ram", "64GB"]
    roomy = estimated(capsys, *arguments, "--machine", "h200")
    assert roomy["verdict"] == "fits"
    assert roomy["sharding"]["host_bytes"] == 0
    assert roomy["sharding"]["device_state_bytes"] == pytest.approx(12 * LLAMA, rel=1e-3)
    crowded = estimated(capsys, *arguments, "--machine", "a100-80gb")
    assert crowded["verdict"] == "fits"
    assert crowded["total_bytes"] == crowded["budget_bytes"]
    assert crowded["sharding"]["host_bytes"] == roomy["total_bytes"] - crowded["budget_bytes"]


@pytest.mark.parametrize("kind", ["allocated", "reserved"])
def test_paged_states_stay_whatever_is_counted(kind: str, capsys: Any) -> None:
    """``cudaMallocManaged`` is bitsandbytes' own: torch's allocator counts none of it."""
    arguments = ["llama-3-8b", "--train", "lora", "--optimizer", "paged-adamw", "--mem-kind", kind]
    found = estimated(capsys, *arguments, "--machine", "h200")
    assert found["sharding"]["host_bytes"] == 0
    assert not any("host" in note for note in found["notes"])
    assert not any("paged states" in term["source"] for term in found["terms"])


def test_paged_states_that_neither_holds_are_too_much_for_the_card(capsys: Any) -> None:
    arguments = ["llama-3-8b", *FULL, "--optimizer", "paged-adamw", "--machine", "a100-80gb"]
    free, held = (
        estimated(capsys, *arguments, "--host-ram", memory) for memory in ("256GB", "8GB")
    )
    assert (free["verdict"], held["verdict"]) == ("fits", "exceeds")
    moved = held["sharding"]["host_bytes"]
    assert moved == held["sharding"]["host_room_bytes"] == 7 * GIB
    everything = free["total_bytes"] + free["sharding"]["host_bytes"]
    assert held["total_bytes"] == pytest.approx(everything - moved, abs=1)
    main(["estimate", *arguments, "--host-ram", "8GB"])
    assert "the host" not in capsys.readouterr().out.split("exceeds:")[1].split("\n")[0]


def test_the_largest_that_unsloth_trains_has_room_on_the_host_too(capsys: Any) -> None:
    words = ["--train", "qlora", "--stack", "unsloth", "--machine", "a100-sxm4-80gb"]
    words += ["--host-ram", "64GB", "--max-seq-length", "8192", "--batch-size", "2"]
    assert_largest_fits(capsys, ["qwen3-0.6b", *words], "batch_size", "max_seq_length")


def test_a_batch_that_the_host_does_not_hold_has_a_smaller_one_that_it_does(capsys: Any) -> None:
    words = ["--train", "qlora", "--stack", "unsloth", "--machine", "a100-sxm4-80gb"]
    words += ["--host-ram", "64GB", "--max-seq-length", "8192"]
    asked = estimated(capsys, "qwen3-0.6b", *words, "--batch-size", "256")
    assert asked["verdict"] == "exceeds"
    less = estimated(capsys, "qwen3-0.6b", *words, "--batch-size", "2")
    assert asked["largest"]["batch_size"] == less["largest"]["batch_size"] is not None


def test_the_largest_model_has_room_on_the_host_too(capsys: Any) -> None:
    words = ["--train", "lora", "--machine", "rtx-4090", "--host-ram", "64GB", "--batch-size", "1"]
    words += ["--grad-checkpoint", "--max-seq-length", "512", "--zero-stage", "3"]
    words += ["--offload-optimizer", "host", "--offload-parameters", "host"]
    name = estimated(capsys, "llama-3-8b", *words, "--largest-model")["largest"]["model"]
    assert estimated(capsys, name, *words)["verdict"] == "fits"


@pytest.mark.parametrize(
    "options",
    [
        # Buckets of DeepSpeed grow to 5e8 elements and no further.
        ["--devices", "4", "--zero-stage", "1", "--optimizer", "lion", "--max-seq-length", "64"],
        ["--devices", "2", "--zero-stage", "3", "--grad-checkpoint", "--rank", "256"],
        # bitsandbytes' states are in 8 bits, and paged, from so many elements on.
        ["--optimizer", "paged-adamw-8bit", "--rank", "1", "--max-seq-length", "64"],
        [
            *["--zero-stage", "3", "--offload-optimizer", "host", "--offload-parameters", "host"],
            *["--host-ram", "64GB", "--max-seq-length", "512", "--grad-checkpoint"],
        ],
    ],
)
def test_the_largest_rank_fits_and_an_eighth_more_does_not(options: list[str], capsys: Any) -> None:
    arguments = ["llama-2-7b", "--train", "lora", "--machine", "rtx-4090", "--batch-size", "1"]
    assert_largest_fits(capsys, [*arguments, *options], "rank")


@pytest.mark.parametrize("rank", ["1", "64", "2200"])
def test_the_largest_rank_is_that_of_8_bit_states(rank: str, capsys: Any) -> None:
    """Few are in float32, as small arrays are; and the update comes to need more than a layer."""
    words = ["--train", "lora", "--engine", "mlx", "--trainer", "uma", "--optimizer", "adamw-8bit"]
    words += ["--machine", "mac-studio-m4-max-64", "--bits", "8", "--batch-size", "8"]
    arguments = ["mistral-7b", *words, "--max-seq-length", "4096", "--rank"]
    found = estimated(capsys, *arguments, rank)["largest"]["rank"]
    assert estimated(capsys, *arguments, str(found))["verdict"] == "fits"
    assert estimated(capsys, *arguments, str(found + found // 64))["verdict"] != "fits"


@pytest.mark.parametrize(
    ("model", "options", "near", "far"),
    [
        (  # the update binds, up to 281 rows of 256 tokens
            "llama-3-8b",
            [
                *["--train", "full", "--engine", "mlx", "--machine", "mac-studio-m4-max-64"],
                *["--trainer", "uma", "--optimizer", "muon", "--batch-size", "1"],
            ],
            "2048",
            "16384",
        ),
        (  # the pool of freed blocks is most of what 2,048 tokens need
            "deepseek-v2-lite",
            [
                *["--train", "qlora", "--machine", "rtx-4090", "--stack", "litgpt"],
                *["--optimizer", "adafactor", "--devices", "4", "--rank", "4"],
            ],
            "128",
            "2048",
        ),
        (
            "gemma-2-9b",
            [
                *["--train", "full", "--machine", "a100-sxm4-80gb", "--optimizer", "lion"],
                *["--loss", "sliced", "--mem-kind", "reserved"],
            ],
            "128",
            "300",
        ),
    ],
)
def test_the_longest_row_does_not_depend_on_the_length_that_was_asked(
    model: str, options: list[str], near: str, far: str, capsys: Any
) -> None:
    lengths = [
        estimated(capsys, model, *options, "--max-seq-length", asked)["largest"]["max_seq_length"]
        for asked in (near, far)
    ]
    assert lengths[0] == pytest.approx(lengths[1], rel=1 / 32)


def test_the_state_of_mlx_is_never_more_than_its_peak(capsys: Any) -> None:
    """``mlx_lm.lora`` has no two gradients at once, unless it adds them up."""
    words = [*FULL, "--engine", "mlx", "--machine", "mac-studio-m3-ultra-512"]
    words += ["--num-layers", "-1", "--max-seq-length", "128", "--optimizer", "adamw"]
    for more in ([], ["--grad-accumulation-steps", "2"], ["--trainer", "uma"]):
        found = estimated(capsys, "llama-3.2-1b", *words, *more)
        assert found["sharding"]["device_state_bytes"] < found["total_bytes"], more
