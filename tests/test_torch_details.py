"""Rules of the torch engine that single programs showed, against what they measured."""

from dataclasses import replace
from typing import Any

import pytest
from test_training_torch import asked, full, model
from torch_tape import Tape

from uma.engines import torch_step
from uma.engines.torch_asked import step
from uma.engines.torch_model import Model, Settings
from uma.engines.torch_training import training_terms
from uma.ledger import peak, phase_totals
from uma.machine import budget_of
from uma.machine.here import machine_of
from uma.memory.loss import Copies
from uma.memory.sharding import States, placed
from uma.memory.term import MemoryTerm
from uma.plan.training.case import TrainingCase
from uma.plan.training.places import places
from uma.plan.training.stack import Stack
from uma.units import GB
from uma.workload import Sharding, TrainingWorkload

# litgpt 26857050, config_hub/finetune/README.md and tutorials: bf16-true, no checkpointing.
LITGPT = Settings(
    autocast=False,
    prepare_kbit=False,
    adapter_width=2,
    dropout=True,
    reentrant=False,
    inputs_need_gradients=False,
    copies=Copies(chunks=8),
)


def litgpt(**changes: Any) -> TrainingWorkload:
    shape = {"rank": 32, "batch_size": 2, "max_seq_length": 512, "grad_checkpoint": 0}
    return asked(targets=("q_proj", "v_proj"), **shape, **changes)


def peak_bytes(name: str, workload: TrainingWorkload, settings: Settings) -> int:
    return peak(training_terms(model(name), workload, settings))[1]


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [("Llama-2-7b-hf", 13.68), ("Mistral-7B-v0.1", 14.29), ("Meta-Llama-3-8B", 17.41)],
)
def test_bitsandbytes_before_0_44_keeps_the_inputs_of_two_batches(
    name: str, gigabytes: float
) -> None:
    """``MatMul4Bit`` kept them in its node, and litgpt's names keep the last batch's nodes."""
    workload = litgpt(quantized="nf4")
    old = replace(LITGPT, keeps_quantized_inputs=True, holds_last_graph=True)
    measured = gigabytes * GB
    assert peak_bytes(name, workload, old) == pytest.approx(measured, rel=0.1)
    assert peak_bytes(name, workload, LITGPT) < 0.8 * measured


def test_autocast_of_frozen_float32_weights_saves_16_bits_of_each() -> None:
    """stablelm-base-alpha-3b in bf16-mixed took 26.92 GB where bf16-true takes 9.69."""
    one_token = replace(litgpt(), batch_size=1, max_seq_length=1)
    narrow, wide = (
        step(Model(model("Llama-2-7b-hf"), one_token, replace(LITGPT, **changes, autocast=True)))
        for changes in ({}, {"weight_width": 4, "adapter_width": 4})
    )
    first = 3 * 4096**2  # products of the first input, which needs no gradient, save nothing
    saved = 6_476_005_376 - first  # elements of all matrices
    assert wide.forward_bytes - narrow.forward_bytes == pytest.approx(2 * saved, rel=1e-4)


def test_data_parallelism_copies_all_gradients_to_buckets() -> None:
    """TinyLlama by litgpt's pretrain.py: 29.84 GB on one device, 32.04 under DDP."""
    workload = full(grad_checkpoint=0, batch_size=4, max_seq_length=2048)
    name = "TinyLlama-1.1B-Chat-v1.0"
    alone = peak_bytes(name, workload, LITGPT)
    shared = peak_bytes(name, replace(workload, sharding=Sharding(data=8)), LITGPT)
    assert shared - alone == 2 * model(name).num_parameters
    assert shared - alone == pytest.approx((32.04 - 29.84) * GB, rel=0.01)


@pytest.mark.parametrize(("optimizer", "gigabytes"), [("adamw", 51.6), ("adamw-8bit", 39.3)])
def test_8_bit_optimizers_make_no_root_of_all_second_moments(
    optimizer: str, gigabytes: float
) -> None:
    """torchao's table of optimizers, Llama-2-7b under torchtune; its AdamW is the fused one."""
    workload = full(optimizer=optimizer, batch_size=2, max_seq_length=512)
    settings = replace(LITGPT, foreach=optimizer != "adamw")
    predicted = peak_bytes("Llama-2-7b-hf", workload, settings)
    assert gigabytes * GB <= predicted <= 1.08 * gigabytes * GB


@pytest.mark.parametrize(
    ("stage", "always", "update"),
    [
        # deepspeed 0.19.8, stage_1_and_2.py, step: gradients, flat ones, float32 ones at once.
        (1, 12 / 8, (2 + 2 + 4) / 8),
        (2, 12 / 8, (2 + 2 + 4) / 8),
        (3, (12 + 2) / 8, 0),  # stage3.py: a flat buffer of gradients, one sub-group at a time
    ],
)
def test_deepspeed_steps_its_part_at_once_or_in_sub_groups(
    stage: int, always: float, update: float
) -> None:
    parameters, largest = model("llama-3-70b").num_parameters, 128_256 * 8192
    workload = full(sharding=Sharding(data=8, zero_stage=stage))
    settings = replace(LITGPT, deepspeed=True, foreach=False)
    terms = training_terms(model("llama-3-70b"), workload, settings)

    def held(name: str, phase: str) -> int:
        return sum(t.size_bytes for t in terms if t.name == name and t.phase == phase)

    kept = sum(held(n, "always") for n in ("gradients", "master_weights", "optimizer_states"))
    assert kept == pytest.approx(always * parameters, rel=1e-6)
    sub_group = 10**9 + largest // 8 if stage == 3 else 0
    expected = update * parameters + (2 + 4) * sub_group
    assert held("gradients", "optimizer") == pytest.approx(expected, rel=1e-6)
    rooted = training_terms(model("llama-3-70b"), workload, replace(settings, foreach=True))
    root = sum(phase_totals(rooted).values()) - sum(phase_totals(terms).values())
    assert root == pytest.approx(2 * sub_group, rel=1e-6)  # 4 and 4 instead of 2 and 4


@pytest.mark.parametrize("every", [0, 1])
def test_gradients_of_deepspeed_are_in_its_buffer_and_not_in_layers_too(every: int) -> None:
    workload = full(grad_checkpoint=every, sharding=Sharding(data=8, zero_stage=3))
    name, settings = "Llama-2-7b-hf", replace(LITGPT, deepspeed=True)
    assert step(Model(model(name), workload, settings)).gradient_bytes == 0
    kept = full(grad_checkpoint=every, sharding=Sharding(data=8, zero_stage=1))
    whole = step(Model(model(name), kept, settings)).gradient_bytes
    assert whole == pytest.approx(2 * model(name).num_parameters, rel=1e-4)


@pytest.mark.parametrize(
    ("optimizer", "states"),
    [("sgd", 0), ("sgd-momentum", 4), ("adafactor", 4), ("adamw", 8), ("adamw-8bit", 2 + 8 / 256)],
)
@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed_has_states_of_flat_float32_copies(
    optimizer: str, states: float, stage: int
) -> None:
    """4 bytes of a copy whatever the optimizer; a flat array has no columns to factor."""
    workload = full(optimizer=optimizer, sharding=Sharding(data=8, zero_stage=stage))
    found = training_terms(model("llama-3-8b"), workload, replace(LITGPT, deepspeed=True))
    part = model("llama-3-8b").num_parameters / 8
    sizes = {t.name: t.size_bytes for t in found if t.phase == "always"}
    assert sizes["master_weights"] == 4 * part
    assert sizes["optimizer_states"] == pytest.approx(states * part, abs=8)


def test_zero_1_keeps_whole_gradients_and_copies_its_part_to_the_host() -> None:
    """deepspeed 0.19.8, ``reduce_ipg_grads``: attributes are cleared at stage 2 alone."""
    found = placed(States(80, 80, 480), Sharding(data=8, zero_stage=1, offload_optimizer="host"))
    assert found.device == States(80, 80, 0)
    assert found.host == States(0, 10, 60)


@pytest.mark.parametrize(
    ("precision", "width", "named"),
    [("mixed", 4, "shapes x float32"), ("16-bit", 2, "shapes x bfloat16")],
)
def test_weights_are_named_and_sent_in_their_own_widths(
    precision: Any, width: int, named: str
) -> None:
    """FSDP's MixedPrecision gathers float32 weights in 16 bits, and reduces gradients in them."""
    workload = full(sharding=Sharding(data=8, zero_stage=3, fsdp=True))
    here = machine_of("8xh100")
    case = TrainingCase(
        model("llama-3-8b"),
        here,
        budget_of(here),
        "torch",
        workload,
        stack=Stack("litgpt", precision),
    )
    weights = next(t for t in case.terms() if t.name == "weights")
    assert weights.source == named
    assert weights.size_bytes == width * model("llama-3-8b").num_parameters // 8
    once = 2 * model("llama-3-8b").num_parameters * 7 // 8
    assert places(case).sent_bytes == {"parameters": 2 * once, "gradients": once}


@pytest.mark.parametrize(("batches", "share"), [(1, 1 / 4), (2, 2 / 4), (4, 1), (8, 1)])
def test_a_stage_keeps_its_layers_for_each_micro_batch_under_way(
    batches: int, share: float
) -> None:
    """1F1B (Narayanan et al. 2021): at most as many micro-batches as there are stages."""

    def found(**changes: Any) -> torch_step.StepPeaks:
        workload = full(max_seq_length=8192, grad_checkpoint=0, **changes)
        return step(Model(model("Llama-2-7b-hf"), workload, LITGPT))

    alone = found()
    stage = found(sharding=Sharding(pipeline=4), grad_accumulation_steps=batches)
    kept = alone.forward_bytes - alone.logits_bytes
    assert stage.forward_bytes - stage.logits_bytes == pytest.approx(share * kept, rel=0.02)
    end = 2 * 32_000 * 4096  # the embedding, or the head
    layers = alone.gradient_bytes - 2 * end
    assert stage.gradient_bytes - end == pytest.approx(layers / 4, rel=0.03)


@pytest.mark.parametrize("name", ["llama-3-70b", "Mixtral-8x7B-v0.1"])
@pytest.mark.parametrize("spread", [Sharding(tensor=8), Sharding(pipeline=8)])
def test_a_part_of_a_split_model_has_a_part_of_the_gradients_and_no_more(
    name: str, spread: Sharding
) -> None:
    """Of few tokens hardly anything else is alive (Megatron, arXiv:1909.08053, section 3)."""
    workload = full(
        optimizer="sgd", max_seq_length=16, batch_size=1, grad_checkpoint=1, sharding=spread
    )
    found = step(Model(model(name), workload, replace(LITGPT, copies=Copies())))
    held = {t.name: t for t in training_terms(model(name), workload, LITGPT) if t.name != "other"}
    gradients = held["gradients"].size_bytes
    assert found.backward_bytes == pytest.approx(gradients, rel=0.01)


def test_sums_of_batches_stay_on_the_device_where_fsdp_offloads_the_rest() -> None:
    """torch 2.13, fsdp/_runtime_utils.py: under ``no_sync`` nothing is reduced, nor copied."""

    def held(**changes: Any) -> int:
        place = {"offload_optimizer": "host", "offload_parameters": "host"}
        spread = Sharding(data=8, zero_stage=3, fsdp=True, **place)
        workload = full(batch_size=1, max_seq_length=2048, grad_checkpoint=1, sharding=spread)
        return peak_bytes("llama-3-8b", replace(workload, **changes), LITGPT)

    more = held(grad_accumulation_steps=4) - held()
    assert more == 2 * model("llama-3-8b").num_parameters


@pytest.mark.parametrize("stage", [1, 2])
def test_buckets_of_deepspeed_are_made_whole_with_the_first_gradient(stage: int) -> None:
    """deepspeed 0.19.8, stage_1_and_2.py, ``setup_buckets``: ``reduce_bucket_size`` elements."""
    spread = Sharding(data=8, zero_stage=stage)
    rows = {"batch_size": 1, "max_seq_length": 64, "grad_checkpoint": 1}
    settings = replace(LITGPT, deepspeed=True)

    few = asked(sharding=spread, optimizer="sgd", **rows)
    phases = phase_totals(training_terms(model("llama-3-8b"), few, settings))
    assert phases["backward"] - phases["forward"] == pytest.approx(2 * 5 * 10**8 * 2, rel=0.01)
    many = replace(few, batch_size=16, max_seq_length=2048)
    assert step(Model(model("llama-3-8b"), many, settings)).loss_binds
    buckets = [
        t for t in training_terms(model("llama-3-8b"), many, settings) if "bucket" in t.source
    ]
    assert not buckets  # the logits are gone before they come


def test_an_optimizer_in_the_backward_pass_keeps_no_gradients() -> None:
    workload = full(batch_size=1, max_seq_length=2048)
    settings = replace(LITGPT, optimizer_in_backward=True)
    terms = training_terms(model("llama-3-8b"), workload, settings)
    assert not [t for t in terms if t.name == "gradients" and t.size_bytes]


def test_ligers_gates_keep_one_array_less_in_each_layer() -> None:
    """Liger-Kernel, ops/swiglu.py: saves gate and up, and not silu(gate)."""
    workload = asked(batch_size=1, max_seq_length=2048, grad_checkpoint=0)
    plain = Settings(fused_kernels=True, copies=Copies(slices=32))
    kept = [
        step(Model(model("Meta-Llama-3-8B"), workload, settings)).forward_bytes
        for settings in (plain, replace(plain, fused_gates=True))
    ]
    assert kept[0] - kept[1] == 32 * 2048 * 14_336 * 2


def test_buckets_of_data_parallelism_are_those_of_a_stage() -> None:
    def bucket(spread: Sharding) -> int:
        terms = training_terms(model("Llama-2-7b-hf"), full(sharding=spread), LITGPT)
        return next(t.size_bytes for t in terms if t.source == "buckets of data parallelism")

    stage = 8 * 202_383_360 + 32_000 * 4096  # layers, and embeddings or head
    assert bucket(Sharding(data=2, pipeline=4)) == pytest.approx(2 * stage, rel=1e-5)


@pytest.mark.parametrize("spread", [Sharding(tensor=4), Sharding(sequence=4)])
def test_scores_of_all_tokens_are_split_by_heads(spread: Sharding) -> None:
    """Megatron and DeepSpeed-Ulysses: each of 4 devices has a quarter of the scores."""

    def scores(spread: Sharding) -> int:
        workload = asked(batch_size=1, grad_checkpoint=0, sharding=spread)
        fused = replace(workload, attention="fused")
        whole, none = (
            step(Model(model("Llama-2-7b-hf"), one, LITGPT)).forward_bytes
            for one in (replace(workload, attention="materialised"), fused)
        )
        return whole - none

    alone = scores(Sharding())
    assert scores(spread) == pytest.approx(alone / 4, rel=0.01)
    softmax = 32 * 32 * 4096**2 * (4 + 2)  # in float32 and its copy, of each layer
    assert alone == pytest.approx(softmax, rel=0.05)


@pytest.mark.parametrize("every", [0, 1, 2])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_layers_before_the_trained_ones_keep_nothing(method: Any, every: int) -> None:
    whole = model("Llama-2-7b-hf")
    last = replace(whole, layers=whole.layers[-4:])
    workload = replace(litgpt(), method=method, num_layers=4, grad_checkpoint=every, targets=())
    inside, alone = (step(Model(one, workload, LITGPT)) for one in (whole, last))
    assert inside.gradient_bytes == alone.gradient_bytes
    # PEFT makes the inputs of checkpoints need gradients, so that adapters' checkpoints keep them.
    inputs = 28 // every * 2 * workload.tokens * 4096 if every and method == "lora" else 0
    assert inside.forward_bytes == alone.forward_bytes + inputs
    assert inside.backward_bytes - alone.backward_bytes in (0, inputs)


def test_gradients_of_an_offloaded_optimizer_leave_the_device() -> None:
    spread = Sharding(data=8, zero_stage=3, offload_optimizer="host", offload_parameters="host")
    workload = full(batch_size=2, max_seq_length=2048, sharding=spread)
    found = step(Model(model("Llama-2-7b-hf"), workload, Settings(copies=Copies(slices=8))))
    one_layer = 2 * sum(p.size for p in model("Llama-2-7b-hf").layers[0].parameters)
    assert found.gradient_bytes < 3 * one_layer


@pytest.mark.parametrize("every", [0, 1])
def test_slices_of_the_loss_need_no_checkpointing(every: int) -> None:
    workload = asked(loss="sliced", grad_checkpoint=every)
    assert step(Model(model("Llama-2-7b-hf"), workload, Settings())).backward_bytes > 0


@pytest.mark.parametrize("settings", [Settings(), Settings(reentrant=False, fused_kernels=True)])
@pytest.mark.parametrize("every", [0, 1, 4])
@pytest.mark.parametrize(
    "name", ["Llama-2-7b-hf", "deepseek-v3", "qwen3.5-4b", "gpt-oss-20b", "llama-4-scout"]
)
def test_layers_that_are_laid_out_alone_need_what_they_need_on_one_tape(
    name: str, every: int, settings: Settings
) -> None:
    """First layers of another kind, patterns that return, windows; hooks that keep gradients."""
    spread = Sharding(data=4, zero_stage=3, fsdp=True)
    workload = asked(targets=(), grad_checkpoint=every, sharding=spread)
    trained = Model(model(name), workload, settings)
    found = step(trained)
    gradients = found.gradient_bytes, found.graded_bytes
    assert (found.forward_bytes, found.backward_bytes, *gradients) == Tape(trained).peaks()


def pool_of(workload: TrainingWorkload, settings: Settings) -> MemoryTerm:
    terms = training_terms(model("Llama-2-7b-hf"), workload, settings)
    return next(t for t in terms if t.name == "buffer_pool")


def test_batches_of_ever_other_lengths_leave_more_in_the_pool() -> None:
    workload = asked(mem_kind="reserved")
    assert (
        pool_of(workload, Settings(variable_lengths=True)).size_bytes
        > 1.5 * pool_of(workload, Settings()).size_bytes
    )


def test_full_training_under_fsdp_1_leaves_more_in_the_pool_than_under_fsdp_2() -> None:
    workload = full(mem_kind="reserved", sharding=Sharding(data=4, zero_stage=3))
    first, second = (pool_of(workload, Settings(fsdp_hooks=hooks)) for hooks in (True, False))
    assert first.size_bytes > 1.5 * second.size_bytes
