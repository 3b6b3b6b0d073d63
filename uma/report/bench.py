"""A measured run as a row in the layout of the project's table of published measurements."""

from collections.abc import Mapping

from uma.ledger import Ledger
from uma.plan.inference import InferencePlan
from uma.units import GIB

COLUMNS = (
    *("rec_id", "kind", "source", "source_type", "source_date"),
    *("engine", "engine_version", "backend", "model", "model_file", "params_b", "active_params_b"),
    *("arch", "quant", "bits_per_weight", "group_size", "weights_size", "weights_unit"),
    *("machine", "chip", "gpu_cores", "gpu_count", "mem_per_device_gb", "bandwidth_gbs"),
    *("ctx_alloc", "prompt_tokens", "gen_tokens", "depth_tokens", "batch", "ubatch", "kv_dtype"),
    *("flash_attn", "offload_layers", "mem_metric", "mem_value", "mem_unit", "mem_gib_norm"),
    *("mem_weights", "mem_kv", "mem_compute", "mem_other", "pp_tok_s", "tg_tok_s", "speed_std"),
    *("outcome", "confidence", "notes"),
)

Cell = str | int | float
Spread = tuple[float, float]
"""Mean and standard deviation."""


def bench_row(
    plan: InferencePlan,
    ledger: Ledger,
    *,
    model: str,
    date: str,
    versions: Mapping[str, str | None],
    peak_bytes: int,
    prompt_tps: Spread,
    generation_tps: Spread,
) -> dict[str, Cell]:
    """The cells in order, what is not known as an empty string; memory in bytes.

    ``model`` is its public name, ``peak_bytes`` MLX's peak while it ran.
    """
    known = _what(plan) | {
        "kind": "memory",
        "source": "uma bench",
        "source_type": "uma bench JSON",
        "source_date": date,
        "engine": "mlx-lm",
        "engine_version": f"mlx-lm {versions['mlx_lm']} mlx {versions['mlx']}",
        "model": model,
        "mem_metric": "MLX peak memory",
        "mem_value": peak_bytes,
        "mem_unit": "B",
        "mem_gib_norm": round(peak_bytes / GIB, 4),
        "mem_weights": ledger.measured.get(("weights", "always")),
        "mem_kv": ledger.measured.get(("kv_cache", "decode")),
        "mem_other": ledger.measured.get(("recurrent_state", "always")),
        "pp_tok_s": round(prompt_tps[0], 2),
        "tg_tok_s": round(generation_tps[0], 2),
        "speed_std": f"{prompt_tps[1]:.2f}/{generation_tps[1]:.2f}",
        "outcome": "ok",
        "confidence": "A",
    }
    return {name: "" if (cell := known.get(name)) is None else cell for name in COLUMNS}


def _what(plan: InferencePlan) -> dict[str, Cell | None]:
    """The cells that the plan alone decides."""
    machine, workload, form = plan.machine, plan.workload, plan.form
    parameters, metal = plan.architecture.num_parameters, machine.backend == "metal"
    return {
        "backend": "Metal" if metal else "CPU",
        "params_b": round(parameters / 1e9, 4),
        "quant": form.name,
        "bits_per_weight": round(8 * form.weights.size_bytes / parameters, 4),
        "group_size": None if form.quantization is None else form.quantization.group_size,
        "weights_size": form.weights.size_bytes,
        "weights_unit": "bytes",
        "machine": machine.name,
        "chip": machine.chip or machine.cpu,
        "gpu_cores": machine.gpu_cores,
        "gpu_count": 1 if metal else None,
        "mem_per_device_gb": round(machine.memory_bytes / GIB, 2),
        "ctx_alloc": workload.context_tokens,
        "prompt_tokens": workload.longest_prompt_tokens,
        "gen_tokens": workload.context_tokens - workload.longest_prompt_tokens,
        "batch": workload.batch_size,
        "ubatch": workload.prefill_step_size,
        "kv_dtype": "float32" if form.activation_bytes == 4 else plan.architecture.dtype,
    }
