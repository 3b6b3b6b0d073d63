"""``uma estimate``: the memory of one model on any machine, under any engine."""

import json as json_module
from typing import Annotated, Literal

import typer

from uma.cli import options as opt
from uma.cli import training_options as tr
from uma.cli.options import RunOptions, chosen_model, size_option
from uma.workload import (
    DEFAULT_KV_GROUP_SIZE,
    DEFAULT_MAX_SEQ_LENGTH,
    DEFAULT_RANK,
    Engine,
)

FlashAttention = Literal["on", "off", "auto"]
CacheDtype = Literal["auto", "bfloat16", "fp8"]
AttnImplementation = Literal["sdpa", "flash_attention_2", "eager"]


def estimate(
    context_: typer.Context,
    model_argument: opt.Model = None,
    model: opt.ModelOption = None,
    engine: Annotated[
        Engine | None,
        typer.Option(help="Program that runs it. [default: mlx on Apple silicon, else llama.cpp]"),
    ] = None,
    bits: opt.Bits = None,
    mode: opt.Mode = None,
    group_size: opt.GroupSize = None,
    quant: Annotated[
        str | None,
        typer.Option(help="Format in the engine's words: 4bit, Q4_K_M, nf4, awq, fp8."),
    ] = None,
    context: opt.ContextTokens = opt.CONTEXT_TOKENS,
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, max=1 << 20, help="Sequences at once.")
    ] = 1,
    prefill_step_size: opt.PrefillStep = None,
    kv_bits: opt.KvBits = None,
    kv_group_size: opt.KvGroupSize = DEFAULT_KV_GROUP_SIZE,
    exact: Annotated[
        bool,
        typer.Option("--exact", help="mlx: trace mlx-lm's own code, without weights, beside it."),
    ] = False,
    parallel: Annotated[
        int | None,
        typer.Option(
            "--parallel", "-np", min=1, max=256, help="llama.cpp: slots, each with the context."
        ),
    ] = None,
    cache_type_k: Annotated[
        str, typer.Option("--cache-type-k", "-ctk", help="llama.cpp: type of the keys.")
    ] = "f16",
    cache_type_v: Annotated[
        str, typer.Option("--cache-type-v", "-ctv", help="llama.cpp: type of the values.")
    ] = "f16",
    ubatch_size: Annotated[
        int,
        typer.Option(
            "--ubatch-size", "-ub", min=1, max=1 << 16, help="llama.cpp: tokens per graph."
        ),
    ] = 512,
    flash_attn: Annotated[
        FlashAttention, typer.Option("--flash-attn", "-fa", help="llama.cpp: fused attention.")
    ] = "auto",
    swa_full: Annotated[
        bool, typer.Option("--swa-full", help="llama.cpp: whole caches of sliding layers.")
    ] = False,
    cache_ram: Annotated[
        int,
        typer.Option(
            "--cache-ram",
            "-cram",
            min=0,
            max=1 << 24,
            help="llama.cpp: MiB that llama-server keeps of earlier prompts; its default is 8192.",
        ),
    ] = 0,
    kv_cache_dtype: Annotated[CacheDtype, typer.Option(help="vllm: type of the cache.")] = "auto",
    gpu_memory_utilization: Annotated[
        float, typer.Option(min=0.01, max=1, help="vllm: share of the card that it reserves.")
    ] = 0.92,
    requests: Annotated[
        str | None,
        typer.Option(
            help="vllm: lengths as PROMPT+ANSWER[xTIMES], such as 512+128x9,4096+512: what paged "
            "and contiguous caches hold of them."
        ),
    ] = None,
    attn_implementation: Annotated[
        AttnImplementation | None,
        typer.Option(help="transformers: kernel of attention. [default: the model's own]"),
    ] = None,
    train: tr.Train = None,
    rank: tr.Rank = DEFAULT_RANK,
    targets: tr.Targets = None,
    num_layers: tr.NumLayers = None,
    max_seq_length: tr.MaxSeqLength = DEFAULT_MAX_SEQ_LENGTH,
    grad_checkpoint: tr.GradCheckpoint = False,
    checkpoint_every: tr.CheckpointEvery = 1,
    grad_accumulation_steps: tr.Accumulation = 1,
    optimizer: tr.Optimizer = "adam",
    loss: tr.Loss = "naive",
    attention: tr.TrainAttention = None,
    mem_kind: tr.MemKind = None,
    precision: tr.Precision = "16-bit",
    stack: tr.StackOption = "trainer",
    prepare_kbit: tr.PrepareKbit = False,
    lora_dropout: tr.LoraDropout = False,
    optimizer_in_backward: tr.OptimizerInBackward = False,
    fused_kernels: tr.FusedKernels = None,
    trainer: tr.TrainerOption = "mlx_lm",
    data: tr.Data = None,
    tokenizer: tr.Tokenizer = None,
    packing: tr.Packing = False,
    largest_model: tr.LargestModel = False,
    devices: tr.Devices = 1,
    zero_stage: tr.ZeroStage = 0,
    fsdp: tr.Fsdp = None,
    shard_group: tr.ShardGroup = None,
    tensor: tr.Tensor = 1,
    pipeline: tr.Pipeline = 1,
    sequence: tr.Sequence = 1,
    offload_optimizer: tr.OffloadOptimizer = None,
    offload_parameters: tr.OffloadParameters = None,
    machine: Annotated[
        str | None,
        typer.Option(help="Machine by name, such as mac-studio-m3-ultra-512 or 2xh100."),
    ] = None,
    ram: Annotated[
        str | None,
        typer.Option(help="A Mac of which the memory is known, as sold: 64GB is 64 GiB."),
    ] = None,
    macos: Annotated[
        int | None, typer.Option(min=11, help="Major version of macOS, which sets the GPU limit.")
    ] = None,
    gpu_limit: Annotated[
        str | None,
        typer.Option(help="GPU limit of unified memory, such as iogpu.wired_limit_mb: 57344MiB."),
    ] = None,
    vram: Annotated[
        str | None, typer.Option(help="Memory of each card, as sold, instead of what is read.")
    ] = None,
    host_ram: Annotated[
        str | None, typer.Option(help="Memory of the machine that the cards are in, as sold.")
    ] = None,
    budget: opt.BudgetSize = None,
    reserve: opt.Reserve = None,
    json: opt.Json = False,
) -> None:
    """Predict the memory of a model, term by term, without loading or fetching it.

    Each term says whether it is exact, a bound, or fitted. The exit code is 3 when the model
    exceeds what there is.

    \b
    Examples:
      uma estimate llama-3-70b --machine mac-studio-m2-ultra-192
      uma estimate llama-3-70b --ram 64GB --macos 26 --exact
      uma estimate qwen3-30b-a3b --machine rtx-4090 -c 32768 -ctk q8_0 -ctv q8_0
      uma estimate llama-3-8b --engine vllm --quant fp8 --batch-size 8 --json
      uma estimate llama-3-8b --train lora --machine rtx-4090 --quant nf4 --grad-checkpoint
    """
    chosen = RunOptions(
        model=chosen_model(context_, model_argument, model),
        bits=bits,
        mode=mode,
        group_size=group_size,
        quant=quant,
        context=context,
        batch_size=batch_size,
        prefill_step_size=prefill_step_size,
        kv_bits=kv_bits,
        kv_group_size=kv_group_size,
        budget_bytes=size_option(budget, "--budget"),
        reserve_bytes=size_option(reserve, "--reserve"),
        json=json,
    )
    sizes = {"ram": ram, "gpu_limit": gpu_limit, "vram": vram, "host_ram": host_ram}
    raise typer.Exit(_estimate(context_, chosen, engine, machine, macos, sizes))


def _estimate(
    context: typer.Context,
    chosen: RunOptions,
    engine: Engine | None,
    named: str | None,
    macos: int | None,
    sizes: dict[str, str | None],
) -> int:
    """Print the estimate; the exit code."""
    from uma.cli import asked

    params = context.params
    if params["exact"]:
        engine = engine or "mlx"
    trained = tr.options_asked(context)
    machine = asked.machine_asked(engine, named, macos, sizes)
    asked.check_options(context, machine, chosen, sizes)
    if trained is not None:
        from uma.cli.training import training

        return training(chosen, trained, engine, machine, exact=params["exact"])
    from uma.cli.plan import model_json
    from uma.errors import DoesNotFit
    from uma.plan.findings import findings
    from uma.report.estimate import estimate_json, estimate_text

    given = [name for name in asked.OWN_OPTIONS if opt.given(context, name)]
    engine = asked.engine_asked(engine, machine, given)
    compare = asked.compare_command(chosen, named)
    if engine == "mlx":
        source, case = asked.mlx_asked(chosen, machine)
        traced = asked.traced(source, case) if params["exact"] else None
        found = findings(case, traced=traced, compare=compare)
    else:
        options = asked.own_options(engine, params)
        source, other = asked.engine_case_asked(chosen, engine, machine, options)
        pages = asked.paging(params["requests"], other) if params["requests"] is not None else None
        found = findings(other, paging=pages, compare=compare)
    if chosen.json:
        from uma.plan.speeds import speeds_of

        document = estimate_json(found, model_json(source), speeds_of(found.estimate))
        print(json_module.dumps(document, indent=2))
    else:
        print(estimate_text(found, source.name))
    exceeds = found.estimate.ledger.verdict == "exceeds"
    return DoesNotFit.exit_code if exceeds else 0
