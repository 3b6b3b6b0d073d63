"""The command or script that runs a plan of ``uma compare``, each value with its reason."""

import shlex
from collections.abc import Callable, Iterator
from typing import Literal

from uma import __version__
from uma.engines.vllm import DEFAULTS as VLLM
from uma.errors import DoesNotFit, UsageError
from uma.plan.compare.parallel import MOST_CARDS
from uma.plan.compare.plans import Plan
from uma.plan.compare.search import Row
from uma.plan.compare.subject import CACHES, Subject
from uma.plan.emit.accelerate import accelerate_lines
from uma.plan.emit.repository import repository, repository_in, stored_as
from uma.plan.emit.split import split_by_layers
from uma.speed.processor import OTHER_VENDOR, processors_of
from uma.units import format_gib, printable
from uma.workload import Engine

Target = Literal["llama.cpp", "mlx", "accelerate", "vllm"]
ENGINES: dict[Target, Engine] = {
    "llama.cpp": "llama.cpp",
    "mlx": "mlx",
    "accelerate": "transformers",
    "vllm": "vllm",
}
WRITTEN_FOR = {  # whose options and defaults were read; another version may have others
    "llama.cpp": "llama.cpp b11434",
    "mlx": "mlx-lm 0.32.2",
    "accelerate": "transformers 5.24, accelerate 1.15 and bitsandbytes 0.50",
    "vllm": "vLLM 0.33",
    "peft": "transformers 5.24, PEFT 0.21 and bitsandbytes 0.50",
    "fsdp": "accelerate 1.15",
}


def configuration(target: Target, subject: Subject, row: Row) -> str:
    """What runs the plan of ``row``, which is one of the target's engine.

    Raises:
        UsageError: If the engine does not run on such a machine.
        DoesNotFit: If no plan of the engine fits it.
        UnsupportedModel: If accelerate's names of the model's parts are not known.
    """
    if row.plan is None:
        raise UsageError(f"--emit {target}: {_why_not(target, subject, row)}")
    if not row.plan.runs:
        why = row.plan.shortcoming(0)
        raise DoesNotFit(
            f"--emit {target}: no plan fits {row.candidate.name}; {row.plan.format} "
            f"{row.plan.technique}: {why}"
        )
    emit: dict[Target, Callable[[Subject, Row, Plan], Iterator[str]]] = {
        "llama.cpp": _llama_cpp,
        "mlx": _mlx,
        "accelerate": accelerate_lines,
        "vllm": _vllm,
    }
    title = f"{_title(subject, row, row.plan)}\n# by uma {__version__}, for {WRITTEN_FOR[target]}"
    return "\n".join([title, *emit[target](subject, row, row.plan)])


def _why_not(target: Target, subject: Subject, row: Row) -> str:
    """Why the target's engine has no plan at all for the machine."""
    engine, machine, width = ENGINES[target], row.candidate.machine, subject.workload.kv_bits
    name, cards = row.candidate.name, machine.kind == "discrete"
    if cards == (target == "mlx"):
        return f"{name} is not for {engine}; mlx is for Macs, accelerate and vllm are for cards"
    if width is not None and cards and (engine, width) not in CACHES:
        known = sorted(bits for one, bits in CACHES if one == engine)
        other = f"it has {known[0]} bits" if known else "it quantizes none"
        return f"{engine} has no cache of {width} bits; {other}: leave --kv-bits out, or change it"
    if target == "accelerate" and machine.link_bytes_per_s is None:
        return (
            f"the link between {name} and its host is not in the catalog, so that nothing can "
            "be planned over it; --emit llama.cpp needs none"
        )
    if target == "vllm" and OTHER_VENDOR in processors_of(machine)[0].notes:
        return f"the memory and the speed of vLLM are known on NVIDIA's cards, not on {name}"
    if target == "vllm" and len(machine.devices) > 1:
        count = len(machine.devices)
        return (
            f"it splits a model over at most {MOST_CARDS} cards, of one kind, whose number divides "
            f"its heads, which {name} is not: try fewer than {count} cards"
        )
    return f"{engine} is not planned for {name} with this model in the widths asked for"


def _title(subject: Subject, row: Row, plan: Plan) -> str:
    beside = f", {format_gib(plan.host_bytes)} on the host" if plan.host_bytes else ""
    beside += f", {format_gib(plan.disk_bytes)} on the disk" if plan.disk_bytes else ""
    title = (
        f"# {subject.source.name} on {row.candidate.machine.name}: {plan.technique}, "
        f"{format_gib(plan.device_bytes)} of {format_gib(plan.budget_bytes)}{beside}"
    )
    return printable(title, kept="")  # else a name with a new line would end the comment


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
        yield "# -sm layer: whole layers on each card, by the cards' memory, the head on the last"
        if plan.technique == "split by layers":
            yield from _split(subject, row, plan)
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


def _split(subject: Subject, row: Row, plan: Plan) -> Iterator[str]:
    """What each card holds."""
    machine = row.candidate.machine
    case = subject.other("llama.cpp", plan.bits, machine)
    assert case is not None
    memory = [device.memory_bytes for device in machine.devices]
    cards = split_by_layers(
        subject.architecture, plan.format, subject.workload, case.settings, memory
    )
    for number, card in enumerate(cards):
        size = format_gib(card.size_bytes)
        yield f"# card {number}: {card.layers} layers, {size} of weights, cache and computation"


def _mlx(subject: Subject, row: Row, plan: Plan) -> Iterator[str]:
    """``uma run``, which keeps the run within what was planned; a server for several requests."""
    context = subject.workload.context_tokens
    if plan.technique == "raised wired limit":
        yield "# the GPU's limit is below what this needs; until the next restart:"
        yield plan.options[0]
    if subject.workload.batch_size > 1:
        yield from _mlx_server(subject, row, plan)
        return
    yield f"# --bits {plan.bits}: the least quantized that was wanted and fits"
    yield f"# --context {context}: prompt and answer together; the memory limits are set for it"
    arguments = ["uma", "run", subject.source.name, "--bits", str(plan.bits)]
    if subject.workload.kv_bits is not None:
        yield f"# --kv-bits {subject.workload.kv_bits}: of the cache"
        arguments += ["--kv-bits", str(subject.workload.kv_bits)]
    yield shlex.join([*arguments, "--context", str(context)])


def _mlx_server(subject: Subject, row: Row, plan: Plan) -> Iterator[str]:
    """Flags: mlx-lm 0.32.2, ``server.py``, whose batches have no quantized cache.

    Raises:
        UsageError: If the plan has one.
    """
    number, case = subject.workload.batch_size, subject.mlx(plan.bits, row.candidate.machine)
    assert case is not None
    if subject.workload.kv_bits is not None:
        raise UsageError(
            "--emit mlx: mlx_lm.server takes one request at a time where --kv-bits is given; leave "
            "it out, or --concurrency"
        )
    source, planned, model = subject.source, case.plan(), repository(subject)
    if source.path is None and "/" in source.name:
        model = source.name
    own = source.kind == "mlx" or model == source.name
    folder = model
    as_made = plan.bits == subject.width(16)
    if not as_made and (planned.form.load_terms or not own):
        folder = f"{model.rpartition('/')[2]}-{plan.bits}bit"
        yield f"# the weights in {plan.bits} bits, as MLX has them"
        yield shlex.join(["uma", "convert", model, "--bits", str(plan.bits), "-o", folder])
    step, caches = planned.workload.prefill_step_size, plan.cache_bytes
    yield f"# planned for {number} requests of {subject.workload.context_tokens} tokens, a length"
    yield "# that mlx_lm.server does not enforce; uma run answers one request at a time"
    yield f"# --prompt-cache-bytes {caches}: the caches of all, those that it saves included"
    arguments = ["mlx_lm.server", "--model", folder, "--prefill-step-size", str(step)]
    arguments += ["--decode-concurrency", str(number), "--prompt-concurrency", str(number)]
    yield shlex.join([*arguments, "--prompt-cache-bytes", str(caches)])


def _vllm(subject: Subject, row: Row, plan: Plan) -> Iterator[str]:
    """Flags: vLLM 0.33.0, ``engine/arg_utils.py``."""
    workload, count = subject.workload, len(row.candidate.machine.devices)
    stored = stored_as(subject, plan.format)
    made = plan.format == "bf16" or (plan.format == "fp8" and not stored)
    model = repository(subject) if made else repository_in(subject, plan.format)
    arguments = ["vllm", "serve", model]
    if stored:
        yield f"# its weights are stored in {plan.format}, and loaded as they are"
    elif not made:
        yield f"# the model must be stored in {plan.format}: uma knows no such repository, so put"
        yield "# the name of one in place of <...>"
    elif plan.format == "fp8":
        yield "# --quantization fp8: weights are quantized while they are loaded"
        arguments += ["--quantization", "fp8"]
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
