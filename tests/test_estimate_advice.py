"""What `uma estimate` advises: in which order, and that each advice passes our own check."""

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from uma.architecture import architecture_from_config
from uma.catalog import find_model, model_config
from uma.checkpoint.source import locate
from uma.cli import main
from uma.cli.commands import COMMANDS
from uma.engines.llama_cpp_weights import tensor_bytes
from uma.machine import Machine, budget_of
from uma.machine.here import machine_of
from uma.plan.advice import advice, remedies
from uma.plan.engine_case import EngineCase, engine_case
from uma.plan.inference import Request
from uma.plan.layer_offload import best_offload
from uma.plan.mlx_case import mlx_case
from uma.units import GIB
from uma.workload import Inference

ORDER = ["programs", "context", "batch", "cache", "bits", "together", "model", "wired_limit"]
ASKED = [
    "llama-3-70b --ram 48GB --macos 26",
    "llama-3-70b --ram 64GB --bits 8",
    "llama-3.1-70b --ram 64GB --macos 26 --context 131072",
    "llama-3.1-70b --ram 40GB --macos 26 --bits 8 --context 65536",
    "qwen3-30b-a3b --ram 24GB --context 32768",
    "qwen3-14b --ram 16GB",
    "gpt-oss-20b --machine macbook-air-m2-16",
    "llama-3-8b --engine transformers --machine rtx-4090 --batch-size 1000",
    "llama-3.1-8b --machine rtx-4060 --context 65536",
    "llama-3.1-8b --machine rtx-4090 --quant F16 --context 131072",
    "llama-3.1-8b --machine rtx-4090 --quant F16 --context 131072 --parallel 2",
    "llama-3-8b --engine vllm --machine rtx-4090 --batch-size 8",
    "llama-3-8b --engine transformers --machine rtx-4070",
]


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    main(["estimate", *arguments, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def mac(memory_gib: int, limit_gib: float, **more: Any) -> Machine:
    return Machine(
        name="a Mac",
        kind="unified",
        backend="metal",
        memory_bytes=memory_gib * GIB,
        limit_bytes=int(limit_gib * GIB),
        limit_source="test",
        **more,
    )


def card_case(model: str, card: str, tokens: int = 8192, host_gib: int = 128) -> EngineCase:
    architecture = architecture_from_config(model_config(find_model(model)).values)
    machine = machine_of(card, host_ram_bytes=host_gib * GIB)
    workload = Inference(tokens)
    return engine_case(architecture, "llama.cpp", None, workload, budget_of(machine), machine)


@pytest.mark.parametrize("line", ASKED)
def test_every_advice_passes_the_tools_own_check(
    capsys: pytest.CaptureFixture[str], line: str
) -> None:
    name, *options = line.split()
    asked = document(capsys, name, *options)
    assert asked["verdict"] != "fits"
    assert asked["advice"]
    for one in asked["advice"]:
        if not one["options"] and one["model"] is None:
            assert "not advised" in one["text"]
            continue
        found = document(capsys, one["model"] or name, *options, *one["options"])
        assert found["verdict"] in ("fits", "tight")
        if one["verdict"] is not None:
            assert (found["verdict"], found["total_bytes"]) == (
                one["verdict"],
                one["needed_bytes"],
            )


@pytest.mark.parametrize("line", ASKED)
def test_advice_comes_in_the_order_of_what_it_costs(
    capsys: pytest.CaptureFixture[str], line: str
) -> None:
    kinds = [one["kind"] for one in document(capsys, *line.split())["advice"]]
    assert kinds == sorted(kinds, key=ORDER.index)
    assert len(kinds) == len(set(kinds))


@settings(max_examples=20, deadline=None)
@given(st.integers(8, 96), st.integers(1, 200_000), st.sampled_from([4, 8, 16]))
def test_advice_never_goes_below_4_bits_and_never_lengthens_the_context(
    memory_gib: int, tokens: int, bits: int
) -> None:
    """C16: an advice only lowers what was asked."""
    machine = mac(memory_gib, 0.75 * memory_gib)
    case = mlx_case(locate("llama-3.1-8b", bits=bits), machine, Request(context_tokens=tokens))
    for one in remedies(case):
        words = dict(zip(one.options[::2], one.options[1::2], strict=True))
        assert int(words.get("--bits", 16)) >= 4
        assert int(words.get("--context", 1)) <= tokens
        assert one.verdict in ("fits", "tight", None)


def test_closing_programs_is_told_first_where_that_is_enough() -> None:
    busy = mac(64, 48, available_bytes=6 * GIB)
    case = mlx_case(locate("llama-3-8b", bits=4), busy, Request(context_tokens=8192))
    assert case.estimate().ledger.verdict == "tight"
    first = remedies(case)[0]
    assert first.kind == "programs"
    assert "close other programs: they leave 5.00 GiB" in first.text
    alone = mlx_case(case.source, mac(64, 48), Request(context_tokens=8192))
    assert alone.estimate().ledger.verdict == "fits"
    assert remedies(alone) == []


def test_closing_programs_is_not_told_where_it_is_not_enough() -> None:
    busy = mac(64, 48, available_bytes=6 * GIB)
    case = mlx_case(locate("llama-3-70b", bits=8), busy, Request(context_tokens=8192))
    assert "programs" not in [one.kind for one in remedies(case)]


def test_fewer_sequences_are_told_where_that_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, *ASKED[7].split())
    assert found["max_batch_size"] is not None
    told = {one["kind"]: one["options"] for one in found["advice"]}
    assert told["batch"] == ["--batch-size", str(found["max_batch_size"])]


def test_the_advice_of_a_quantized_cache_says_in_how_many_layers_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Gemma 3 27B: every sixth of 62 layers attends to the whole context (its config.json)."""
    found = document(capsys, "gemma-3-27b", "--ram", "24GB", "-c", "40000")
    texts = [one["text"] for one in found["advice"] if "--kv-bits" in one["options"]]
    assert texts
    assert all("quantizes the caches of 10 of 62 layers" in text for text in texts)


def test_a_checkpoint_of_mixed_widths_is_told_to_be_quantized_throughout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """gpt-oss stores its experts in MXFP4 and the rest in 16 bits (its config.json)."""
    told = {one["kind"]: one for one in document(capsys, *ASKED[6].split())["advice"]}
    assert (told["bits"]["options"], told["bits"]["verdict"]) == (["--bits", "4"], "tight")


def test_the_wired_limit_is_told_last_with_how_to_keep_and_to_undo_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    last = document(capsys, *ASKED[0].split())["advice"][-1]
    assert last["kind"] == "wired_limit"
    value = int(re.findall(r"sudo sysctl iogpu\.wired_limit_mb=(\d+)\n", last["text"])[0])
    assert last["options"] == ["--gpu-limit", f"{value}MiB"]
    assert "LaunchDaemon" in last["text"]
    assert "To undo it: sudo sysctl iogpu.wired_limit_mb=0" in last["text"]
    smaller = document(capsys, *ASKED[0].split(), "--gpu-limit", f"{value - 1}MiB")
    assert smaller["verdict"] == "exceeds"


def test_a_raised_limit_is_not_advised_against_the_users_own_budget(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = document(capsys, *ASKED[0].split(), "--budget", "30GiB")
    assert "wired_limit" not in [one["kind"] for one in found["advice"]]


def test_uma_run_advises_the_same_changes() -> None:
    case = mlx_case(locate("llama-3-70b", bits=8), mac(64, 48), Request(context_tokens=8192))
    assert advice(case.plan(), case.source) == [one.text for one in remedies(case)]


# --- a card: layers on it, the rest on the host ------------------------------------------------


def test_layers_on_the_card_and_on_the_host_are_all_of_the_model() -> None:
    case = card_case("meta-llama/Meta-Llama-3-70B-Instruct", "rtx-4090")
    found = best_offload(case)
    assert found is not None
    option, number = found.options
    assert option == "-ngl"
    sizes = list(tensor_bytes(case.architecture, "Q4_K_M"))
    first = len(case.architecture.layers) + 1 - int(number)  # llama-model.cpp, i_gpu_start
    below = sum(size for tensor, size in sizes if tensor.layer is not None and tensor.layer < first)
    cache = first * 2 * 8 * 128 * 8192 * 2  # heads x head_dim of Llama 3 70B, 16 bits
    embeddings = sum(size for tensor, size in sizes if tensor.role == "token_embd")
    assert found.host_bytes == below + cache + embeddings
    whole = case.estimate().ledger.predicted_peak_bytes
    largest = max(size for tensor, size in sizes if tensor.layer is not None)
    assert found.device_bytes == whole - below - cache + largest


@pytest.mark.parametrize("card", ["rtx-4060", "rtx-4070", "rtx-4090", "rtx-5090"])
def test_the_offload_fits_the_card_and_one_layer_more_would_not(card: str) -> None:
    case = card_case("meta-llama/Meta-Llama-3-70B-Instruct", card)
    found = best_offload(case)
    assert found is not None
    assert found.device_bytes <= case.budget.budget_bytes
    layer = case.weights.size_bytes // 80 // 2  # half a layer, whose size differs in this mix
    assert found.device_bytes + layer > case.budget.budget_bytes - layer


def test_of_a_mixture_the_experts_go_to_the_host_first() -> None:
    case = card_case("openai/gpt-oss-120b", "rtx-4090")
    found = best_offload(case)
    assert found is not None
    assert found.options[:3] == ("-ngl", "999", "-ncmoe")
    experts = sum(
        size
        for tensor, size in tensor_bytes(case.architecture, case.format)
        if len(tensor.shape) == 3 and tensor.layer is not None
    )
    # 128 experts of 3 x 2880 x 2880 numbers in MXFP4 (17 bytes for 32) in each of 36 layers.
    assert experts == 36 * 128 * 3 * 2880 * 2880 * 17 // 32
    layers = int(found.options[3])
    embeddings = 201_088 * 2880
    assert found.host_bytes == pytest.approx(experts * layers // 36 + embeddings, rel=0.03)


def test_there_is_no_offload_to_a_host_that_is_too_small() -> None:
    assert best_offload(card_case("openai/gpt-oss-120b", "rtx-4090", host_gib=16)) is None


def test_the_command_to_compare_is_told_where_there_is_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = document(capsys, "llama-3-70b", "--machine", "rtx-4090")
    assert found["offload"]["options"] == ["-ngl", "41"]
    if "compare" in COMMANDS:
        assert found["compare"] == "uma compare llama-3-70b --machine rtx-4090 --context 8192"
    else:
        assert found["compare"] is None
