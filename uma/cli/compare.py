"""``uma compare``: which machine for a model, and how: one memory against cards."""

from typing import Annotated, Literal

import typer

from uma.cli import options as opt
from uma.cli.options import chosen_model
from uma.workload import DEFAULT_MAX_SEQ_LENGTH, DEFAULT_RANK

Prefer = Literal["quality", "speed", "price", "context"]
Emit = Literal[
    "llama.cpp",
    "mlx",
    "accelerate",
    "vllm",
    "peft",
    "deepspeed",
    "peft-deepspeed",
    "fsdp",
    "peft-fsdp",
]


def compare(
    context_: typer.Context,
    model_argument: opt.Model = None,
    model: opt.ModelOption = None,
    context: Annotated[
        list[str] | None,
        typer.Option(
            "--context",
            "--ctx-size",
            "-c",
            metavar="TOKENS",
            help="Prompt plus answer of each sequence, in tokens; repeatable, or a list as 4k,32k. "
            f"[default: {opt.CONTEXT_TOKENS}]",
        ),
    ] = None,
    machine: Annotated[
        list[str] | None,
        typer.Option(
            "--machine",
            help="A machine or a pattern, such as mac-studio-*, 2xrtx-3090 or 2xmac-studio-*; "
            "repeatable. [default: this one and 12 that are sold]",
        ),
    ] = None,
    all_: Annotated[
        bool, typer.Option("--all", help="Every machine of the catalog, cards also in pairs.")
    ] = False,
    min_bits: Annotated[int, typer.Option(min=2, max=16, help="Fewest bits of a weight.")] = 4,
    min_tps: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1e9,
            help="Tokens per second that are fast enough. [default: 10; to train, any]",
        ),
    ] = None,
    min_context: Annotated[
        int | None,
        typer.Option(
            parser=opt.context_tokens,
            metavar="TOKENS",
            help="Memory for so many tokens; the speed is that at --context.",
        ),
    ] = None,
    prefer: Annotated[
        Prefer,
        typer.Option(
            help="quality: the least quantized that is fast enough; speed, price, context (the "
            "most memory to spare) choose and order by those."
        ),
    ] = "quality",
    concurrency: Annotated[
        int, typer.Option(min=1, max=1 << 16, help="Requests at once, each with the context.")
    ] = 1,
    kv_bits: Annotated[
        Literal["8", "4"] | None,
        typer.Option(help="Quantize the KV cache: 8 bits, or 4, which vLLM does not have."),
    ] = None,
    train: Annotated[
        Literal["lora", "rslora", "qlora", "dora", "full"] | None,
        typer.Option(help="Compare fine-tuning instead: adapters of one kind, or all weights."),
    ] = None,
    rank: Annotated[
        int, typer.Option(min=1, max=1 << 16, help="train: rank of the adapters.")
    ] = DEFAULT_RANK,
    max_seq_length: Annotated[
        int, typer.Option(min=2, max=1 << 24, help="train: tokens of the longest row.")
    ] = DEFAULT_MAX_SEQ_LENGTH,
    batch_size: Annotated[
        int, typer.Option(min=1, max=1 << 16, help="train: rows at once on each device.")
    ] = 1,
    macos: Annotated[
        int | None, typer.Option(min=11, help="Major version of macOS, which sets the GPU limit.")
    ] = None,
    host_ram: Annotated[
        str, typer.Option(help="Memory of the machine that cards are in, as sold.")
    ] = "64GB",
    host_bandwidth: Annotated[
        float,
        typer.Option(
            min=1, max=1e6, help="GB/s of that memory: 89.6 is two channels of DDR5-5600."
        ),
    ] = 89.6,
    pcie: Annotated[
        Literal["3", "4", "5"] | None,
        typer.Option(help="Generation of its slots (x16). [default: that of the card]"),
    ] = None,
    host_disk: Annotated[
        str | None,
        typer.Option(help="Room on its disk for weights (and states, to train), as 2TB."),
    ] = None,
    disk_bandwidth: Annotated[
        float | None, typer.Option(min=0.001, max=1e6, help="GB/s of that disk.")
    ] = None,
    host_price: Annotated[
        int | None, typer.Option(min=0, max=10**9, help="US$ of that machine without cards.")
    ] = None,
    host_power: Annotated[
        int | None,
        typer.Option(min=0, max=10**6, help="Watts of that machine without cards, at work."),
    ] = None,
    price: Annotated[
        list[str] | None,
        typer.Option(
            help="What a machine, a card or several (2xrtx-3090) cost you, as NAME=USD; repeatable."
        ),
    ] = None,
    rent: Annotated[
        list[str] | None,
        typer.Option(help="What a machine costs you an hour, as NAME=USD/h; repeatable."),
    ] = None,
    hours_per_day: Annotated[
        float | None, typer.Option(min=0, max=24, help="Hours of work a day, for the total cost.")
    ] = None,
    years: Annotated[
        float | None, typer.Option(min=0, max=100, help="Years of use, for the total cost.")
    ] = None,
    kwh: Annotated[
        float | None, typer.Option(min=0, max=1000, help="US$ of a kWh; 0 leaves electricity out.")
    ] = None,
    launch_prices: Annotated[
        bool, typer.Option("--launch-prices", help="Let prices at launch be the cheapest.")
    ] = False,
    emit: Annotated[
        Emit | None,
        typer.Option(
            help="Print the command or script that runs the plan of one --machine with this "
            "program, each value with its reason; peft-deepspeed and peft-fsdp are the scripts for "
            "the files of deepspeed and fsdp."
        ),
    ] = None,
    csv: Annotated[
        bool, typer.Option("--csv", help="A line a machine, for a spreadsheet.")
    ] = False,
    json: opt.Json = False,
) -> None:
    """Compare machines for a model: what fits, by which technique, how fast, at what price.

    Of each machine the least quantized plan that fits and is fast enough is shown, and why better
    ones were not taken. The exit code is 3 when it fits none.

    \b
    Examples:
      uma compare llama-3-70b --context 16384
      uma compare llama-3-70b --machine mac-studio-m2-ultra-192 --machine 2xrtx-3090
      uma compare qwen3-30b-a3b --machine 'rtx-*' --prefer speed --host-price 900
      uma compare llama-3-70b --context 8k,32k,128k --machine '2xmac-studio-m3-ultra-512'
      uma compare llama-3-8b --train qlora --machine rtx-4090 --machine 2xrtx-3090
      uma compare llama-3-70b --rent h100=2.49/h --hours-per-day 8 --years 3 --kwh 0.30
      uma compare llama-3-70b --machine rtx-4090 --emit llama.cpp
    """
    from uma.cli.comparing import run

    run(context_, chosen_model(context_, model_argument, model))
