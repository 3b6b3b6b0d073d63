"""The script that runs a plan with transformers and accelerate: over cards, host and disk.

transformers 5.24, accelerate 1.15, bitsandbytes 0.50.
"""

from collections.abc import Iterator, Mapping

from uma.architecture.layers import Architecture
from uma.errors import UsageError
from uma.plan.compare.placed import SCHEMES, placed
from uma.plan.compare.plans import Plan
from uma.plan.compare.search import Row
from uma.plan.compare.subject import Subject
from uma.plan.emit.device_map import Device, check_names, placement
from uma.plan.emit.repository import repository
from uma.units import format_gib

ARGUMENTS = {"int8": "load_in_8bit=True", "nf4": 'load_in_4bit=True, bnb_4bit_quant_type="nf4"'}


def accelerate_lines(subject: Subject, row: Row, plan: Plan) -> Iterator[str]:
    """The script's lines for a plan.

    Raises:
        UsageError: If the model has modules for images, or the plan is in a stored format.
        UnsupportedModel: If the names of its modules are not known.
    """
    config = subject.source.config or {}
    if "text_config" in config or subject.architecture.model_type == "gemma3":
        raise UsageError(
            f"--emit accelerate: {subject.source.name} is a model of text and images, whose "
            "modules have other names; llama.cpp runs its text alone (--emit llama.cpp)"
        )
    check_names(subject.architecture)
    if plan.format not in SCHEMES:
        raise UsageError(
            f"--emit accelerate: {plan.format} is not made while loading; 16, 8, 4 are"
        )
    case = subject.other("transformers", plan.bits, row.candidate.machine)
    assert case is not None
    rooms = placed(subject, case).rooms
    context = subject.workload.context_tokens
    yield f"# planned for {context} tokens of context"
    yield from script(repository(subject), subject.architecture, rooms, SCHEMES[plan.format])


def script(
    model: str, architecture: Architecture, rooms: Mapping[Device, int], scheme: str | None = None
) -> Iterator[str]:
    """A script that loads ``model`` within ``rooms`` of weights and answers a prompt."""
    found = placement(architecture, rooms, scheme)
    outside = any(isinstance(device, str) for device in found.device_map.values())
    yield "import torch"
    names = ["AutoModelForCausalLM", "AutoTokenizer", *(["BitsAndBytesConfig"] if scheme else [])]
    yield f"from transformers import {', '.join(names)}"
    yield ""
    yield f"MODEL = {model!r}"
    yield "# what each card leaves to weights beside the cache, activations and CUDA's context; and"
    yield "# what the host leaves"
    yield f"MAX_MEMORY = {dict(rooms)!r}"
    if outside and scheme is not None:
        yield f'# device_map="auto" refuses {scheme} with modules on the host: they have to be'
        yield "# named here, and stay in 16 bits"
    else:
        yield '# what device_map="auto" makes of that limit'
    if outside:
        yield "# layers that are not on a card are copied to it in every step, for which it keeps"
        yield "# room for the largest one"
    for device, size in found.size_bytes.items():
        place = _PLACES.get(device, f"card {device}")
        yield f"# {place}: {size:,} bytes of weights, {format_gib(size)}"
    yield "DEVICE_MAP = {"
    yield from (f"    {name!r}: {device!r}," for name, device in found.device_map.items())
    yield "}"
    yield ""
    yield "tokenizer = AutoTokenizer.from_pretrained(MODEL)"
    yield "model = AutoModelForCausalLM.from_pretrained("
    yield "    MODEL,"
    yield "    dtype=torch.bfloat16,"
    if scheme is not None:
        yield "    quantization_config=BitsAndBytesConfig("
        yield f"        {ARGUMENTS[scheme]},"
        if scheme == "nf4":
            yield "        bnb_4bit_compute_dtype=torch.bfloat16,"
        if outside:
            yield "        llm_int8_enable_fp32_cpu_offload=True,  # for both formats"
        yield "    ),"
    yield "    device_map=DEVICE_MAP,"
    yield "    max_memory=MAX_MEMORY,"
    if "disk" in found.size_bytes:
        yield '    offload_folder="offload",  # for what is on "disk"'
    yield ")"
    yield 'inputs = tokenizer("Hello", return_tensors="pt").to(model.device)'
    yield "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=32)[0]))"


_PLACES: dict[Device, str] = {"cpu": "the host", "disk": "the disk"}
