"""Options that several commands share, declared once; names as in mlx-lm where it has them."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from uma.errors import UsageError
from uma.frozen import dataclass
from uma.units import parse_bytes
from uma.workload import DEFAULT_KV_GROUP_SIZE, Inference

_TOKENS = re.compile(r"(\d[\d,_]*)([km]?)", re.IGNORECASE)
CONTEXT_TOKENS = Inference().context_tokens
MAX_CONTEXT_TOKENS = 1 << 24  # above the longest model's: Llama 4 Scout, 10,485,760


def size_option(text: str | None, name: str) -> int | None:
    """Bytes of a size option, or ``None`` when it was not given."""
    if text is None:
        return None
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise UsageError(f"{name}: {error}") from None


def require_numbers(**values: float | None) -> None:
    """Refuse ``nan`` and ``inf``, which typer's own bounds let through, by the option's name."""
    for name, value in values.items():
        if value is not None and not math.isfinite(value):
            raise UsageError(f"--{name.replace('_', '-')} {value} is not a number that can be used")


def given(context: typer.Context, name: str) -> bool:
    """Whether an option stands on the command line, and not in a variable or file."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def chosen_model(context: typer.Context, argument: str | None, option: str | None) -> str | None:
    """The model of the first argument or of ``--model``; the argument overrules a setting.

    Raises:
        UsageError: If the command line gives both.
    """
    if argument is not None and given(context, "model"):
        raise UsageError("the model is given twice: as --model and as the first argument")
    if "" in (argument, option):
        raise UsageError("the model's name is empty: leave it out for the model that is shipped")
    return argument or option


def complete_model(start: str) -> list[str]:
    """Names of the catalog that begin with ``start``, for the shell's completion."""
    from uma.catalog import models, short_name

    return [name for name in map(short_name, models()) if name.startswith(start)]


def context_tokens(text: str | int) -> int:
    """A number of tokens; ``8k`` is 8,192, as contexts are named.

    >>> context_tokens("8k"), context_tokens("20,000"), context_tokens(4096)
    (8192, 20000, 4096)
    """
    match = _TOKENS.fullmatch(str(text).strip())
    tokens = 0
    if match is not None and len(match[1]) < 16:
        scale = {"": 1, "k": 1 << 10, "m": 1 << 20}[match[2].lower()]
        tokens = int(match[1].replace(",", "").replace("_", "")) * scale
    if not 1 <= tokens <= MAX_CONTEXT_TOKENS:
        raise typer.BadParameter(
            f"{str(text)[:40]!r} is not a number of tokens from 1 to {MAX_CONTEXT_TOKENS:,}, such "
            "as 8192 or 8k"
        )
    return tokens


def positive(name: str) -> Callable[[int | None], int | None]:
    """A check that an integer option is at least 1."""

    def check(value: int | None) -> int | None:
        if value is not None and value < 1:
            raise typer.BadParameter(f"{value} is not a positive number", param_hint=name)
        return value

    return check


Model = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]",
        show_default=False,
        autocompletion=complete_model,
        help="A folder, a .gguf file, a hub repository, or a name such as llama-3-70b.",
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        autocompletion=complete_model,
        help="The model, instead of the first argument.",
    ),
]
Bits = Annotated[
    int | None,
    typer.Option(help="Bits per weight: 2, 3, 4, 5, 6, 8, or 16 for full precision. [default: 4]"),
]
Mode = Annotated[
    str | None, typer.Option(help="Number format: affine, mxfp4, mxfp8, nvfp4. [default: affine]")
]
GroupSize = Annotated[
    int | None, typer.Option("--group-size", "--q-group-size", help="Weights that share a scale.")
]
Quant = Annotated[str | None, typer.Option(help="Format by name, such as 4bit, mxfp4, Q4_K_M.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub repository.")]
ContextTokens = Annotated[
    int,
    typer.Option(
        "--context",
        "--ctx-size",
        "-c",
        parser=context_tokens,
        metavar="TOKENS",
        help="Prompt plus answer of each sequence, in tokens.",
    ),
]
PrefillStep = Annotated[
    int | None,
    typer.Option(
        "--prefill-step-size",
        callback=positive("--prefill-step-size"),
        help="Prompt tokens per evaluation; smaller needs less memory. [default: 2048]",
    ),
]
KvBits = Annotated[int | None, typer.Option(help="Quantize the KV cache: 2, 4 or 8 bits.")]
KvGroupSize = Annotated[int, typer.Option(help="Group size of the quantized cache.")]
BudgetSize = Annotated[
    str | None, typer.Option("--budget", help="Memory the run may use, such as 24GiB.")
]
Reserve = Annotated[
    str | None, typer.Option(help="Memory left to the system and other programs, such as 4GiB.")
]
Dequantize = Annotated[
    Literal["auto", "always", "never"],
    typer.Option(help="On a CPU: hold float32 weights, which run faster there."),
]
Force = Annotated[bool, typer.Option("--force", help="Go on although the plan does not fit.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Download without asking.")]
NoWire = Annotated[bool, typer.Option("--no-wire", help="Do not wire the model's memory.")]
NoRecord = Annotated[bool, typer.Option("--no-record", help="Keep no record of this run.")]
Wait = Annotated[bool, typer.Option("--wait", help="Wait for another heavy uma command to end.")]
AllowConcurrent = Annotated[
    bool, typer.Option("--allow-concurrent", help="Run beside another heavy uma command.")
]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of one ``uma run``, checked; sizes in bytes."""

    model: str | None = None
    prompt: str | None = None
    prompts: Path | None = None
    batch_prompts: tuple[str, ...] = ()
    system: str | None = None
    bits: int | None = None
    mode: str | None = None
    group_size: int | None = None
    quant: str | None = None
    revision: str | None = None
    context: int | None = None
    prompt_tokens: int | None = None
    batch_size: int = 1
    max_tokens: int | None = None
    temp: float | None = None
    top_p: float | None = None
    min_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    thinking: str = "on"
    chat_template_config: str | None = None
    prefill_step_size: int | None = None
    kv_bits: int | None = None
    kv_group_size: int = DEFAULT_KV_GROUP_SIZE
    prompt_cache: Path | None = None
    adapter_path: Path | None = None
    draft_model: str | None = None
    num_draft_tokens: int = 3
    budget_bytes: int | None = None
    reserve_bytes: int | None = None
    wire: bool = True
    dequantize: str = "auto"
    force: bool = False
    dry_run: bool = False
    json: bool = False
    verbose: bool = False
    quiet: bool = False
    yes: bool = False
    record: bool = True
    wait: bool = False
    allow_concurrent: bool = False
