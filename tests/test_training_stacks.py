"""One description of each stack: `uma estimate` and `uma compare` say the same of a training."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_compare_training import machine, subject

from uma.cli import main
from uma.engines.eager import EAGER_BY_DEFAULT
from uma.engines.torch_model import Model
from uma.errors import UsageError
from uma.plan.compare.candidates import HostProfile
from uma.plan.compare.recipes import Kind, Recipe
from uma.plan.compare.training import _need, _recipes
from uma.plan.emit.peft import OPTIMIZERS
from uma.plan.training.stack import Stack
from uma.plan.training.stacks import PROGRAMS, settings_for
from uma.units import GIB
from uma.workload import Sharding, TrainingWorkload, bits_named

HOST = HostProfile(512 * GIB)
PLANNED: list[tuple[str, Kind, str]] = [
    ("llama-3-8b", "qlora", "rtx-4090"),
    ("llama-3-70b", "qlora", "rtx-6000-ada"),
    ("llama-3-8b", "full", "2xrtx-4090"),
    ("llama-3-8b", "qlora", "2xrtx-4090"),
    ("llama-3-70b", "full", "8xh100-sxm5-80gb"),
    ("llama-3-8b", "lora", "rtx-4090"),
    ("gemma-2-9b", "lora", "a100-sxm4-80gb"),
    ("llama-3-8b", "dora", "dgx-spark"),
    ("llama-3-8b", "qlora", "mac-studio-m4-max-64"),
]


def estimated(capsys: Any, *arguments: str) -> dict[str, Any]:
    main(["estimate", *arguments, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def words_of(recipe: Recipe, kind: Kind) -> Iterator[str]:
    """The options of ``uma estimate`` that say what a recipe is."""
    workload, spread = recipe.workload, recipe.workload.sharding
    yield from ("--train", kind, "--num-layers", "-1", "--batch-size", "1")
    yield from ("--optimizer", workload.optimizer)
    if workload.grad_checkpoint:
        yield "--grad-checkpoint"
    if recipe.engine == "mlx":
        yield from ("--bits", str(recipe.bits), "--trainer", recipe.trainer)
        return
    yield from ("--quant", workload.quantized or "bf16", "--precision", recipe.stack.precision)
    yield from ("--devices", str(spread.data))
    if spread.fsdp:
        yield from ("--fsdp", "full")
    elif spread.zero_stage:
        yield from ("--zero-stage", str(spread.zero_stage))
    for name in ("optimizer", "parameters"):
        if place := getattr(spread, f"offload_{name}"):
            yield from (f"--offload-{name}", place)


@pytest.mark.parametrize(("model", "kind", "name"), PLANNED)
def test_estimate_and_compare_say_the_same_of_every_recipe(
    model: str, kind: Kind, name: str, capsys: Any
) -> None:
    asked, candidate = subject(model, kind), machine(name, HOST)
    recipes = list(_recipes(asked, candidate))
    assert recipes
    for recipe in recipes:
        words = list(words_of(recipe, kind))
        host = ["--host-ram", "512GiB"] if candidate.discrete else []
        found = estimated(capsys, model, "--machine", name, *host, *words)
        need = _need(asked, asked.case(recipe, candidate))
        paged = recipe.workload.optimizer.startswith("paged")
        if not paged:  # compare counts on the device what is not moved
            assert found["total_bytes"] == need.device_bytes, words
            assert found["sharding"]["host_bytes"] == need.host_bytes, words


CARD = ["--machine", "a100-sxm4-80gb", "--batch-size", "1"]


def test_full_training_of_8b_in_16_bits_fits_80_gb_with_trainers_fused_adamw(capsys: Any) -> None:
    """Weights, gradients and both moments: 8 bytes a parameter, and nothing for the update."""
    asked = [*CARD, "--train", "full", "--grad-checkpoint", "--mem-kind", "allocated"]
    now, then = (
        estimated(capsys, "llama-3-8b", *asked, "--stack", stack)
        for stack in ("trainer", "trainer-2024")
    )
    parameters = now["trainable_parameters"]
    assert now["phases"]["optimizer_bytes"] == pytest.approx(8 * parameters, rel=0.001)
    assert then["phases"]["optimizer_bytes"] == pytest.approx(10 * parameters, rel=0.001)


@pytest.mark.parametrize("quant", ["bf16", "nf4"])
def test_zero_1_needs_less_than_data_parallelism_but_for_buckets(quant: str, capsys: Any) -> None:
    asked = ["llama-3-8b", "--train", "lora", "--machine", "8xa100-sxm4-80gb", "--devices", "8"]
    asked += ["--batch-size", "3", "--max-seq-length", "257", "--mem-kind", "allocated"]
    whole, sharded = (
        estimated(capsys, *asked, "--quant", quant, "--zero-stage", stage)["total_bytes"]
        for stage in ("0", "1")
    )
    assert sharded < whole + 2 * 5 * 10**8 * 2  # reduce_bucket_size, twice, in 16 bits


def test_a_prepared_base_has_float32_embeddings_and_head(capsys: Any) -> None:
    """Llama-3-8B's 2 x 128,256 x 4,096 numbers and 65 norms, by 2 bytes more each."""
    asked = ["llama-3-8b", *CARD, "--train", "qlora"]
    plain, prepared = (
        next(t["size_bytes"] for t in found["terms"] if t["name"] == "weights")
        for found in (
            estimated(capsys, *asked),
            estimated(capsys, *asked, "--prepare-kbit"),
        )
    )
    assert prepared - plain == 2 * (2 * 128_256 * 4096 + 65 * 4096)


@pytest.mark.parametrize("model", ["gemma-2-9b", "gpt-oss-20b"])
def test_a_model_without_sdpa_is_trained_with_eager_attention(model: str, capsys: Any) -> None:
    asked = [model, *CARD, "--train", "lora", "--max-seq-length", "2048"]
    own, eager, fused = (
        estimated(capsys, *asked, *words)
        for words in ([], ["--attention", "materialised"], ["--attention", "fused"])
    )
    assert own["total_bytes"] == eager["total_bytes"] > fused["total_bytes"]
    assert any("attention is eager" in note for note in own["notes"])
    assert not any("attention is eager" in note for note in fused["notes"])


def test_torchtunes_full_training_of_8b_runs_on_24_gb(capsys: Any) -> None:
    """torchtune's README: 18.9 GiB, an RTX 4090, two rows of 2,048 tokens at most."""
    asked = ["llama-3.1-8b", "--train", "full", "--stack", "torchtune", "--machine", "rtx-4090"]
    asked += ["--optimizer", "paged-adamw-8bit", "--batch-size", "2", "--grad-checkpoint"]
    asked += ["--optimizer-in-backward", "--mem-kind", "reserved"]
    found = estimated(capsys, *asked)
    assert found["verdict"] == "tight"
    assert found["total_bytes"] / GIB == pytest.approx(18.9, rel=0.25)


@pytest.mark.parametrize("name", ["dgx-spark", "jetson-agx-orin-64gb", "framework-desktop-128gb"])
def test_machines_of_one_memory_that_are_no_macs_train_with_torch(name: str, capsys: Any) -> None:
    found = estimated(capsys, "llama-3.2-1b", "--train", "lora", "--machine", name)
    assert (found["engine"], found["verdict"]) == ("torch", "fits")


@pytest.mark.parametrize(
    ("name", "words"), [("rtx-4090", ["--quant", "nf4"]), ("mac-studio-m4-max-64", ["--bits", "4"])]
)
def test_qlora_is_lora_on_a_base_in_4_bits(name: str, words: list[str], capsys: Any) -> None:
    asked = ["llama-3.2-1b", "--machine", name, "--train"]
    found = estimated(capsys, *asked, "qlora")
    assert found == estimated(capsys, *asked, "lora", *words)
    assert main(["estimate", *asked, "qlora", "--bits", "16"]) == 2
    assert "give --train lora" in capsys.readouterr().err


def test_rslora_takes_what_lora_takes(capsys: Any) -> None:
    asked = ["llama-3.2-1b", *CARD, "--train"]
    assert estimated(capsys, *asked, "rslora") == estimated(capsys, *asked, "lora")


def test_a_quantized_base_is_not_advised_to_go_to_the_host_from_one_card(capsys: Any) -> None:
    """PEFT 0.21, docs/source/accelerate/fsdp.md: FSDP alone offloads it, over several devices."""
    asked = ["llama-3-70b", "--train", "lora", "--machine", "2xrtx-4090", "--grad-checkpoint"]
    asked += ["--batch-size", "1", "--host-ram", "128GB"]
    found = estimated(capsys, *asked)
    words = [word for one in found["measures"] for word in one["options"]]
    assert found["measures_suffice"]
    assert {"--fsdp", "nf4"} <= set(words)
    assert "--zero-stage" not in words
    after = estimated(capsys, *asked, *words)
    saved = sum(one["saves_bytes"] for one in found["measures"])
    assert found["total_bytes"] - saved == after["total_bytes"]
    alone = ["--quant", "nf4", "--zero-stage", "3", "--offload-optimizer", "host"]
    assert main(["estimate", *asked, *alone, "--offload-parameters", "host"]) == 2
    assert "under FSDP alone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--prepare-kbit"], "for a base in one of"),
        (["--quant", "nf4", "--prepare-kbit", "--devices", "2", "--fsdp", "full"], "does not join"),
        (["--stack", "litgpt", "--quant", "nf4", "--prepare-kbit"], "litgpt does not call"),
        (["--stack", "litgpt", "--devices", "2", "--zero-stage", "1"], "not with DeepSpeed"),
        (["--precision", "mixed", "--devices", "2", "--zero-stage", "1"], "float32 weights of its"),
        (["--optimizer-in-backward"], "give --stack torchtune"),
        (["--stack", "unsloth", "--fused-kernels", "liger"], "unsloth has its own"),
        (["--train", "full", "--lora-dropout"], "--train full has none"),
    ],
)
def test_what_a_program_does_not_do_is_explained(
    words: list[str], reason: str, capsys: Any
) -> None:
    train = [] if "--train" in words else ["--train", "lora"]
    assert main(["estimate", "llama-3-8b", *CARD, *train, *words]) == 2
    assert reason in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("word", ["4bit", "nf4", "7 bits"])
def test_a_format_that_mlx_has_not_is_an_error(word: str) -> None:
    with pytest.raises(UsageError, match="no format of weights on MLX"):
        bits_named(word)


def test_every_stack_has_its_settings_and_only_deepspeed_casts_adapters() -> None:
    architecture = subject("llama-3-8b", "lora").architecture
    zero = TrainingWorkload(num_layers=None, sharding=Sharding(data=2, zero_stage=2))
    for name, program in PROGRAMS.items():
        alone = settings_for(Stack(name), TrainingWorkload(num_layers=None), architecture)
        assert alone.adapter_width == program.adapter_width
        assert not alone.deepspeed
    cast = settings_for(Stack(), zero, architecture)
    assert (cast.adapter_width, cast.autocast, cast.deepspeed) == (2, False, True)


def test_todays_trainer_is_what_transformers_peft_and_deepspeed_do() -> None:
    """Recorded from real objects by scripts/check_torch_stacks.py."""
    real = json.loads((Path(__file__).parent / "data/torch_stacks.json").read_text("utf-8"))
    now = PROGRAMS["trainer"]
    assert real["optimizer"] == OPTIMIZERS["adamw"]
    assert now.foreach == (real["optimizer"] == "adamw_torch")
    assert now.reentrant == real["checkpointing"]["use_reentrant"]
    assert [now.adapter_width] == real["adapters"]
    assert set(real["without_sdpa"]) >= EAGER_BY_DEFAULT
    architecture = subject("llama-3-8b", "lora").architecture
    quantized = TrainingWorkload(num_layers=None, quantized="nf4")
    for prepares, rest in ((False, real["base"]), (True, real["prepared"])):
        settings = settings_for(Stack(prepare_kbit=prepares), quantized, architecture)
        assert [Model(architecture, quantized, settings).weight_width] == rest
    sharded = TrainingWorkload(num_layers=None, sharding=Sharding(data=2, zero_stage=1))
    cast = settings_for(Stack(), sharded, architecture)
    assert [cast.adapter_width] == real["deepspeed"]["trained"]
    assert [Model(architecture, sharded, cast).weight_width] == real["deepspeed"]["all"]
    assert cast.autocast == real["deepspeed"]["autocast"]
