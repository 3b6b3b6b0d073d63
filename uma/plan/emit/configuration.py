"""The command or script that runs a plan of ``uma compare``, each value with its reason."""

import shlex
from collections.abc import Callable, Iterator
from typing import Literal

from uma.checkpoint.names import resolve
from uma.engines.vllm import DEFAULTS as VLLM
from uma.errors import DoesNotFit, UsageError
from uma.plan.compare.discrete import host_room_bytes, layer_shares
from uma.plan.compare.plans import Plan
from uma.plan.compare.search import Row
from uma.plan.compare.subject import CACHES, Subject
from uma.plan.emit.device_map import Device, auto_device_map, modules_of
from uma.units import format_gib
from uma.workload import Engine

Target = Literal["llama.cpp", "mlx", "accelerate", "vllm"]
ENGINES: dict[Target, Engine] = {
    "llama.cpp": "llama.cpp",
    "mlx": "mlx",
    "accelerate": "transformers",
    "vllm": "vllm",
}


def configuration(target: Target, subject: Subject, row: Row) -> str:
    """What runs the plan of ``row``, which is one of the target's engine.

    Raises:
        UsageError: If the engine does not run on such a machine.
        DoesNotFit: If no plan of the engine fits it.
        UnsupportedModel: If accelerate's names of the model's parts are not known.
    """
    if row.plan is None:
        raise UsageError(
            f"--emit {target}: {ENGINES[target]} is not planned for {row.candidate.name} with this "
            "model; mlx is for Macs, accelerate and vllm are for cards"
        )
    if not row.plan.runs:
        why = row.plan.shortcoming(0)
        raise DoesNotFit(
            f"--emit {target}: no plan fits {row.candidate.name}; {row.plan.format} "
            f"{row.plan.technique}: {why}"
        )
    emit: dict[Target, Callable[[Subject, Row, Plan], Iterator[str]]] = {
        "llama.cpp": _llama_cpp,
        "mlx": _mlx,
        "accelerate": _accelerate,
        "vllm": _vllm,
    }
    return "\n".join([_title(subject, row, row.plan), *emit[target](subject, row, row.plan)])


def _title(subject: Subject, row: Row, plan: Plan) -> str:
    beside = f", {format_gib(plan.host_bytes)} on the host" if plan.host_bytes else ""
    return (
        f"# {subject.source.name} on {row.candidate.machine.name}: {plan.technique}, "
        f"{format_gib(plan.device_bytes)} of {format_gib(plan.budget_bytes)}{beside}"
    )


def _llama_cpp(subject: Subject, row: Row, plan: Plan) -> Iterator[str]:
    """Flags: llama.cpp b11434, ``common/arg.cpp``."""
    workload, machine = subject.workload, row.candidate.machine
    file = f"{repository(subject).rpartition('/')[2]}-{plan.format}.gguf"
    if subject.source.gguf_headers and subject.source.path is not None:
        file = str(subject.source.path)
    options = list(plan.options) if plan.technique != "raised wired limit" else ["-ngl", "999"]
    layers = len(subject.architecture.layers)
    yield f"# -m: the model as GGUF in {plan.format}"
    if plan.technique == "layers on the host":
        kept = int(options[1])
        yield (
            f"# -ngl {kept}: the head and the last {kept - 1} of {layers} layers are on the card, "
            "the others are computed by the host"
        )
    else:
        yield f"# -ngl 999: the head and all {layers} layers are on the device"
    if plan.technique == "experts on the host":
        count = options[-1]
        yield f"# -ncmoe {count}: the experts of the first {count} layers stay on the host"
    if plan.technique == "raised wired limit":
        yield f"# the GPU's limit has to be raised first: {plan.options[0]}"
    if len(machine.devices) > 1:
        case = subject.other("llama.cpp", plan.bits, machine)
        assert case is not None
        counts = " and ".join(str(round(layers * one)) for one in layer_shares(subject, case))
        yield f"# -sm layer: whole layers on each card, {counts} of them by the cards' memory"
        options += ["-sm", "layer"]
    sequences = workload.batch_size
    total = sequences * workload.context_tokens
    yield f"# -c {total}: {workload.context_tokens} tokens for each of {sequences} (-np)"
    yield "# -fa on: scores of attention are not stored, as the plan assumes"
    caches = CACHES.get(("llama.cpp", workload.kv_bits or 0), {})
    for flag, kind in zip(("-ctk", "-ctv"), caches.values(), strict=False):
        yield f"# {flag} {kind}: a cache of {workload.kv_bits} bits"
        options += [flag, kind]
    arguments = ["llama-server", "-m", file, *(options or ["-ngl", "999"])]
    arguments += ["-c", str(total), "-np", str(sequences), "-fa", "on"]
    yield shlex.join(arguments)


def _mlx(subject: Subject, row: Row, plan: Plan) -> Iterator[str]:
    """``uma run``, which keeps the run within what was planned."""
    context = subject.workload.context_tokens
    if plan.technique == "raised wired limit":
        yield "# the GPU's limit is below what this needs; until the next restart:"
        yield plan.options[0]
    yield f"# --bits {plan.bits}: the least quantized that was wanted and fits"
    yield f"# --context {context}: prompt and answer together; the memory limits are set for it"
    arguments = ["uma", "run", subject.source.name, "--bits", str(plan.bits)]
    if subject.workload.kv_bits is not None:
        yield f"# --kv-bits {subject.workload.kv_bits}: of the cache"
        arguments += ["--kv-bits", str(subject.workload.kv_bits)]
    yield shlex.join([*arguments, "--context", str(context)])


def _vllm(subject: Subject, row: Row, plan: Plan) -> Iterator[str]:
    """Flags: docs.vllm.ai/en/v0.8.5/serving/engine_args.html."""
    workload, count = subject.workload, len(row.candidate.machine.devices)
    arguments = ["vllm", "serve", repository(subject)]
    if plan.format == "fp8":
        yield "# --quantization fp8: weights are quantized while they are loaded"
        arguments += ["--quantization", "fp8"]
    elif plan.format != "bf16":
        yield f"# the model must be stored in {plan.format}: put such a repository here"
    heads = f"each has 1/{count} of every matrix" if count > 1 else "one card"
    yield f"# --tensor-parallel-size {count}: {heads}"
    yield f"# --max-model-len {workload.context_tokens}: prompt and answer of a request"
    if workload.kv_bits is not None:
        yield "# --kv-cache-dtype fp8: half of the cache of 16 bits"
        arguments += ["--kv-cache-dtype", "fp8"]
    most = max(workload.batch_size, VLLM.max_num_seqs)
    yield f"# --max-num-seqs {most}: what its buffers are planned for; how many run at once"
    yield "# depends on the room that is left to their caches"
    part = str(VLLM.gpu_memory_utilization)
    yield f"# --gpu-memory-utilization {part}: what vLLM takes at its start, whatever is asked"
    arguments += ["--tensor-parallel-size", str(count)]
    arguments += ["--max-model-len", str(workload.context_tokens)]
    arguments += ["--max-num-seqs", str(most), "--gpu-memory-utilization", part]
    yield shlex.join(arguments)


def rooms_for_weights(subject: Subject, row: Row) -> dict[Device, int]:
    """What the card leaves to weights beside cache and activations, and what the host does."""
    machine = row.candidate.machine
    case = subject.other("transformers", 16, machine)
    assert case is not None
    beside = subject.needed_bytes(case) - case.weights.size_bytes
    return {0: case.budget.budget_bytes - beside, "cpu": host_room_bytes(machine)}


def _accelerate(subject: Subject, row: Row, plan: Plan) -> Iterator[str]:
    """A script for transformers 5.24 and accelerate 1.15."""
    config = subject.source.config or {}
    if "text_config" in config or subject.architecture.model_type == "gemma3":
        raise UsageError(
            f"--emit accelerate: {subject.source.name} is a model of text and images, whose "
            "modules have other names; llama.cpp runs its text alone (--emit llama.cpp)"
        )
    architecture, rooms = subject.architecture, rooms_for_weights(subject, row)
    tied = architecture.tie_word_embeddings
    device_map = auto_device_map(modules_of(architecture), rooms, tied_head=tied)
    yield "import torch"
    yield "from transformers import AutoModelForCausalLM, AutoTokenizer"
    yield ""
    yield f"MODEL = {repository(subject)!r}"
    yield f"# what the card leaves to weights beside the cache of {subject.workload.context_tokens}"
    yield "# tokens, activations and CUDA's context; and what the host leaves"
    yield f"MAX_MEMORY = {rooms!r}"
    yield '# what accelerate makes of that limit with device_map="auto": layers that are not on 0'
    yield "# are copied to it in every step, for which it keeps room for the largest one"
    yield "DEVICE_MAP = {"
    yield from (f"    {name!r}: {device!r}," for name, device in device_map.items())
    yield "}"
    yield ""
    yield "tokenizer = AutoTokenizer.from_pretrained(MODEL)"
    yield "model = AutoModelForCausalLM.from_pretrained("
    yield "    MODEL,"
    yield "    dtype=torch.bfloat16,  # 16 bits: quantized layers cannot be offloaded as they are"
    yield "    device_map=DEVICE_MAP,"
    yield "    max_memory=MAX_MEMORY,"
    yield '    offload_folder="offload",  # for what is on "disk"'
    yield ")"
    yield 'inputs = tokenizer("Hello", return_tensors="pt").to(model.device)'
    yield "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=32)[0]))"


def repository(subject: Subject) -> str:
    """The model's own repository, whose weights are not quantized, else what was asked for."""
    source = subject.source
    if source.repo is None and source.path is not None:
        return str(source.path)
    model = resolve(source.name).model
    return model.hf_id if model is not None else source.name
