"""What the options of ``uma estimate`` ask for: the machine, the engine, the model under it."""

import re
from typing import TYPE_CHECKING, Any

import typer

from uma.cli.options import RunOptions, given, size_option
from uma.errors import RuntimeUnavailable, UnsupportedModel, UsageError
from uma.workload import Engine, Inference

if TYPE_CHECKING:
    from uma.checkpoint.source import ModelSource
    from uma.machine import Machine
    from uma.plan.engine_case import EngineCase
    from uma.plan.findings import Paging
    from uma.plan.mlx_case import MlxCase
    from uma.runtime.trace import Traced

# Options that one engine alone has: the parameter's name, the engine, the field of its settings.
OWN_OPTIONS: dict[str, tuple[Engine, str]] = {
    "mode": ("mlx", ""),
    "group_size": ("mlx", ""),
    "prefill_step_size": ("mlx", ""),
    "kv_bits": ("mlx", ""),
    "kv_group_size": ("mlx", ""),
    "exact": ("mlx", ""),
    "parallel": ("llama.cpp", "n_parallel"),
    "cache_type_k": ("llama.cpp", "cache_type_k"),
    "cache_type_v": ("llama.cpp", "cache_type_v"),
    "ubatch_size": ("llama.cpp", "n_ubatch"),
    "flash_attn": ("llama.cpp", "flash_attn"),
    "swa_full": ("llama.cpp", "swa_full"),
    "cache_ram": ("llama.cpp", "cache_ram_mib"),
    "kv_cache_dtype": ("vllm", "kv_cache_dtype"),
    "gpu_memory_utilization": ("vllm", "gpu_memory_utilization"),
    "requests": ("vllm", ""),
    "attn_implementation": ("transformers", "attn_implementation"),
}

# What ``uma.checkpoint.names`` takes in a model's name for a width that is not MLX's word for it.
_FOREIGN = r"i?q\d\w*|(?P<int>int[48])"


def machine_asked(
    engine: Engine | None, named: str | None, macos: int | None, sizes: dict[str, str | None]
) -> "Machine":
    """The machine that is named or described, else this one, as ``uma run`` sees it under MLX.

    Raises:
        UnknownName: If nothing is called so.
        UsageError: If the options contradict each other or the machine.
    """
    from uma.cli.calibrated import calibrated
    from uma.machine.here import machine_of
    from uma.machine.named import sold_bytes

    if macos is not None and named is None and sizes["ram"] is None:
        raise UsageError("--macos is for a machine that is described: give --machine or --ram")
    if engine == "mlx" and named is None and not any(sizes.values()):
        from uma.machine import read_machine

        return calibrated(read_machine())
    sold = {
        f"{name}_bytes": None if size is None else sold_bytes(size, f"--{name.replace('_', '-')}")
        for name, size in sizes.items()
        if name != "gpu_limit"
    }
    gpu_limit_bytes = size_option(sizes["gpu_limit"], "--gpu-limit")
    found = machine_of(named, gpu_limit_bytes=gpu_limit_bytes, macos=macos, **sold)
    return found if named is not None or any(sizes.values()) else calibrated(found)


def engine_asked(engine: Engine | None, machine: "Machine", given: list[str]) -> Engine:
    """The engine, which has each of the options that are ``given``.

    Raises:
        UsageError: If one of them is another engine's, or MLX does not know the machine.
    """
    from uma.plan.estimate import default_engine

    found = engine or default_engine(machine)
    for name in given:
        owner = OWN_OPTIONS[name][0]
        if owner != found:
            raise UsageError(
                f"--{name.replace('_', '-')} is an option of {owner}, and the engine is {found}: "
                f"leave it out, or give --engine {owner}"
            )
    if found == "mlx" and machine.kind == "discrete":
        raise UsageError(
            f"--engine mlx: its memory is known on Apple silicon and on processors, not on "
            f"{machine.name}; leave --engine out for llama.cpp"
        )
    return found


def check_options(
    context: typer.Context, machine: "Machine", chosen: RunOptions, sizes: dict[str, str | None]
) -> None:
    """Refuse options of which one would be left out in silence.

    Raises:
        UsageError: If two contradict each other, or one means nothing on this machine.
    """
    from uma.machine.named import sold_bytes
    from uma.units import GIB

    params = context.params
    if chosen.bits is not None and chosen.quant is not None:
        raise UsageError("--bits and --quant both say the format of the weights: give one of them")
    parallel = params["parallel"]
    if parallel is not None and given(context, "batch_size") and parallel != chosen.batch_size:
        raise UsageError(
            f"--parallel {parallel} and --batch-size {chosen.batch_size} both say how many "
            "sequences run at once: give one of them"
        )
    if params["macos"] is not None and machine.backend != "metal":
        raise UsageError(f"--macos sets the GPU limit of a Mac, which {machine.name} is not")
    share = params["gpu_memory_utilization"]
    if not 0 < share <= 1:
        raise UsageError(f"--gpu-memory-utilization {share} is no share: give one such as 0.92")
    host_ram = sizes["host_ram"]
    if host_ram is not None and sold_bytes(host_ram, "--host-ram") < GIB:
        raise UsageError(f"--host-ram: {host_ram} is less than a machine has")


def own_options(engine: Engine, params: dict[str, Any]) -> dict[str, Any]:
    """The values of an engine's own options, by the fields of its settings."""
    fields = {field: name for name, (of, field) in OWN_OPTIONS.items() if of == engine and field}
    return {field: params[name] for field, name in fields.items()}


def mlx_asked(chosen: RunOptions, machine: "Machine") -> "tuple[ModelSource, MlxCase]":
    """The model as ``uma run`` would plan it.

    Raises:
        UsageError: If ``--quant`` is a format of another engine.
    """
    from uma.cli.plan import request_of, require_kv_bits
    from uma.plan.mlx_case import mlx_case

    source, asked = source_asked(chosen)
    case = mlx_case(source, machine, request_of(chosen), asked=asked)
    require_kv_bits(chosen, case.architecture)
    return source, case


def source_asked(chosen: RunOptions) -> "tuple[ModelSource, dict[str, Any]]":
    """The model under MLX, and the bits, mode and group size that are asked of it.

    Raises:
        UsageError: If ``--quant`` is a format of another engine.
    """
    from uma.cli.plan import described, is_gguf, located
    from uma.plan.forms import asked_format

    _require_own_words(chosen.quant)
    source = described(chosen, located(chosen))
    # What was asked of a GGUF file was done when it was converted.
    return source, {} if is_gguf(source) else asked_format(source, **_format(chosen))


def _require_own_words(quant: str | None) -> None:
    """
    Raises:
        UsageError: If llama.cpp or transformers calls a format so, and MLX does not.
    """
    from uma.checkpoint.names import parse_quant

    match = None if quant is None else re.fullmatch(_FOREIGN, quant, re.IGNORECASE)
    if match is None:
        return
    owner = "transformers" if match["int"] else "llama.cpp"
    raise UsageError(
        f"--quant {quant} is a format of {owner} (--engine {owner}); mlx has its own: "
        f"--bits {parse_quant(match[0])[0]}"
    )


def _format(chosen: RunOptions) -> dict[str, Any]:
    return {name: getattr(chosen, name) for name in ("bits", "mode", "group_size", "quant")}


def engine_case_asked(
    chosen: RunOptions, engine: Engine, machine: "Machine", options: dict[str, Any]
) -> "tuple[ModelSource, EngineCase]":
    """The model under another engine, with that engine's own ``options``."""
    from dataclasses import replace

    from uma.architecture import architecture_from_config
    from uma.checkpoint.gguf_config import config_of_gguf
    from uma.cli.plan import described, located
    from uma.machine import budget_of
    from uma.plan.engine_case import engine_case
    from uma.plan.engine_words import format_of_bits, stored_format
    from uma.plan.inverses import LARGEST_BATCH

    quant = chosen.quant or (None if chosen.bits is None else format_of_bits(engine, chosen.bits))
    as_stored = engine == "llama.cpp" and quant is None
    # The format is the engine's own: what the name stands for without it.
    plain = replace(chosen, quant=None, bits=None)
    source = located(plain)
    if source.gguf_headers:
        source = replace(source, config=config_of_gguf(source.gguf_headers[0]))
    else:
        source = described(plain, source)
    if source.config is None:
        raise UnsupportedModel(f"{source.name}: its configuration is not known")
    budget = budget_of(
        machine, user_budget_bytes=chosen.budget_bytes, reserve_bytes=chosen.reserve_bytes
    )
    assert chosen.context is not None  # it has a default here
    sequences = max(chosen.batch_size, options.pop("n_parallel", None) or 1)
    if engine == "llama.cpp" and sequences > LARGEST_BATCH[engine]:
        raise UsageError(
            f"--batch-size {sequences}: llama.cpp runs at most {LARGEST_BATCH[engine]} sequences "
            "at once"
        )
    case = engine_case(
        architecture_from_config(source.config),
        engine,
        quant or stored_format(engine, source.config),
        Inference(chosen.context, batch_size=sequences),
        budget,
        machine,
        options,
        model=source.name,
        file=source.gguf_headers[0] if source.gguf_headers and as_stored else None,
    )
    return source, case


def require_mlx() -> None:
    """Prepare this process to trace mlx-lm's own code.

    Raises:
        RuntimeUnavailable: If MLX is not installed.
    """
    import gc
    import os
    from importlib.util import find_spec

    gc.enable()  # ``uma.cli.main`` has it off for estimates
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it advises to install PyTorch
    if find_spec("mlx") is None or find_spec("mlx_lm") is None:
        raise RuntimeUnavailable(
            "--exact traces mlx-lm's own code, and MLX is not installed: pip install mlx mlx-lm "
            "(on Linux 'mlx[cpu]'), or leave --exact out: the closed forms need neither"
        )
    from uma.runtime.bare_package import bare_mlx_lm

    bare_mlx_lm()


def traced(source: "ModelSource", case: "MlxCase") -> "Traced":
    """mlx-lm's own code traced for the form and workload that the plan has chosen.

    Raises:
        RuntimeUnavailable: If MLX is not installed.
        UnsupportedModel: If mlx-lm has no code for the model, or it cannot be traced.
    """
    require_mlx()
    from uma.quantization import quantization_of_config

    plan = case.plan()
    config = source.config or {}
    dtype = plan.architecture.dtype if plan.form.activation_bytes == 2 else "float32"
    held = plan.form.quantization or quantization_of_config(config)
    form = None if plan.form.kind == "float32" else held
    from uma.runtime.trace import trace

    return trace(config, form, plan.workload, case.machine.backend, dtype=dtype)


def paging(text: str, case: "EngineCase") -> "Paging":
    """What vLLM's pages and a contiguous cache hold of the requests that ``--requests`` lists."""
    from uma.engines.vllm import sequence_blocks
    from uma.memory.paging import mean_holding, parse_requests
    from uma.plan.findings import Paging

    context = case.workload.context_tokens
    size = case.settings.block_size
    blocks = sequence_blocks(case.architecture, context, case.settings)
    slot_bytes = -(-blocks.size_bytes // context)
    holding = mean_holding(parse_requests(text), context, size)
    return Paging(holding, slot_bytes, case.workload.batch_size)


def compare_command(chosen: RunOptions, named: str | None) -> str:
    """The ``uma compare`` of the same work."""
    words = ["uma compare", chosen.model or "", *(["--machine", named] if named else [])]
    return " ".join([*filter(None, words), "--context", str(chosen.context)])
