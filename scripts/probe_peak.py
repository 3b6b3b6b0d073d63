"""Predicted against measured peaks of mlx-lm's generation on MLX's CPU backend.

For every kind of layer a small model with random weights runs a prompt in chunks, then a few
tokens. ``mx.get_peak_memory`` after each phase stands beside ``inference_terms``: what
``uma/memory/activations.py`` says was found and is checked with this program.

    python scripts/probe_peak.py [KIND ...] [--dtype float32] [--bits 4] [--kv-bits 8]
        [--prompt 1025] [--step 512] [--limit serial|predicted|none]

``--limit`` is MLX's memory limit: 1 byte, so that evaluation never runs ahead; the one that is to
hold the predicted peak; or none.
"""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.models import CONFIGS, build_model
from uma.architecture import architecture_from_config
from uma.engines.mlx import inference_terms, largest_output_bytes
from uma.ledger import peak, phase_totals
from uma.memory.term import MemoryTerm
from uma.runtime.load import weights_bytes
from uma.workload import Inference

NO_LIMIT = 1 << 50
SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 6,
    "sliding_window": 256,
    "attention_chunk_size": 256,
    "kv_lora_rank": 128,
    "q_lora_rank": 96,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "moe_intermediate_size": 192,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "n_routed_experts": 16,
    "num_local_experts": 16,
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "mamba_d_head": 32,
    "mamba_d_ssm": 256,
    "mamba_d_state": 64,
    "mamba_n_heads": 8,
    "state_size": 64,
    "num_heads": 8,
}
OWN_SIZES: dict[str, dict[str, Any]] = {
    "sinks": {"intermediate_size": 192, "layer_types": None},
    "chunked": {"num_experts_per_tok": 1, "num_local_experts": 4},
    "latent": {"num_key_value_heads": 8},
    "expanded": {"num_key_value_heads": 8},
    "recurrent": {"head_dim": 64, "intermediate_size": 512},
}
SHORT_CONVOLUTIONS = {
    "model_type": "lfm2",
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 256,
    "block_ff_dim": 768,
    "block_multiple_of": 64,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "full_attn_idxs": [2, 5],
    "layer_types": (["conv"] * 2 + ["full_attention"]) * 2,
    "rope_theta": 10000.0,
    "eos_token_id": 2,
}
EXPANDED_LATENT = CONFIGS["latent"] | {
    "model_type": "deepseek_v2",
    "moe_layer_freq": 1,
    "rope_scaling": {
        "type": "yarn",
        "factor": 1.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 0,
    },
}
KINDS = CONFIGS | {"expanded": EXPANDED_LATENT, "short_conv": SHORT_CONVOLUTIONS}


def model_config(kind: str, **sizes: Any) -> dict[str, Any]:
    """The configuration of ``tests/models.py``, enlarged until sizes matter."""
    chosen = SIZES | OWN_SIZES.get(kind, {}) | sizes

    def enlarged(config: dict[str, Any]) -> dict[str, Any]:
        extra = {"vocab_size": chosen["vocab_size"]} if "hidden_size" in config else {}
        return {key: chosen.get(key, value) for key, value in config.items()} | extra

    config = enlarged(KINDS[kind])
    if "text_config" in config:
        config["text_config"] = enlarged(config["text_config"])
    return config


@dataclass(frozen=True, slots=True)
class Peaks:
    """Measured bytes: the weights, the peak of each phase, and the seconds of the whole run."""

    weights: int
    prefill: int
    decode: int
    seconds: float


def random_model(config: dict[str, Any], dtype: str = "float32", bits: int | None = None) -> Any:
    """mlx-lm's module with random weights, quantized as ``mlx_lm.convert`` does."""
    model = build_model(config, dtype=dtype)
    if bits is not None:
        from mlx_lm.utils import quantize_model

        model, _ = quantize_model(model, dict(config), 64, bits)
        mx.eval(model.parameters())
    return model


def measured_peaks(model: Any, workload: Inference, memory_limit: int | None = None) -> Peaks:
    """Run ``mlx_lm.generate.generate_step`` and read MLX's counters, others' arrays excluded."""
    from mlx_lm.generate import generate_step

    weights = weights_bytes(model)
    mx.synchronize()
    mx.clear_cache()
    base = mx.get_active_memory() - weights
    limit = NO_LIMIT if memory_limit is None else max(1, base + memory_limit)
    former = mx.set_memory_limit(limit)
    peaks = {"prefill": 0, "decode": 0}

    def progress(done: int, total: int) -> None:
        mx.synchronize()
        phase = "prefill" if done < total else "decode"
        if done:
            peaks[phase] = max(peaks[phase], mx.get_peak_memory() - base)
        mx.reset_peak_memory()

    prompt = workload.longest_prompt_tokens
    start = time.perf_counter()
    steps = generate_step(
        mx.zeros((prompt,), mx.uint32),
        model,
        max_tokens=workload.context_tokens - prompt,
        prefill_step_size=workload.prefill_step_size,
        kv_bits=workload.kv_bits,
        kv_group_size=workload.kv_group_size,
        quantized_kv_start=0,
        prompt_progress_callback=progress,
    )
    for _ in steps:
        pass
    mx.synchronize()
    seconds = time.perf_counter() - start
    peaks["decode"] = max(peaks["decode"], mx.get_peak_memory() - base)
    mx.set_memory_limit(former)
    return Peaks(weights, peaks["prefill"], peaks["decode"], seconds)


def predicted_terms(
    config: dict[str, Any], weight_bytes: int, workload: Inference, activation_bytes: int
) -> tuple[tuple[MemoryTerm, ...], int]:
    """The terms on the CPU backend, and the memory limit that holds their peak."""
    architecture = architecture_from_config(config)
    weights = MemoryTerm("weights", weight_bytes, "exact", "measured")
    terms = inference_terms(
        architecture, weights, workload, backend="cpu", activation_bytes=activation_bytes
    )
    output = largest_output_bytes(
        architecture, weights, workload, backend="cpu", activation_bytes=activation_bytes
    )
    return terms, peak(terms)[1] - output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", default=list(KINDS), metavar="KIND")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--bits", type=int)
    parser.add_argument("--kv-bits", type=int)
    parser.add_argument("--prompt", type=int, default=1025)
    parser.add_argument("--step", type=int, default=512)
    parser.add_argument("--limit", choices=["serial", "predicted", "none"], default="serial")
    chosen = parser.parse_args()
    workload = Inference(chosen.prompt + 4, chosen.prompt, 1, chosen.step, chosen.kv_bits)
    width = 4 if chosen.dtype == "float32" else 2
    for kind in chosen.kinds:
        config = model_config(kind)
        model = random_model(config, chosen.dtype, chosen.bits)
        weights = weights_bytes(model)
        terms, limit = predicted_terms(config, weights, workload, width)
        limits = {"serial": 1, "predicted": limit, "none": None}
        peaks = measured_peaks(model, workload, limits[chosen.limit])
        totals = phase_totals(terms)
        for phase in ("prefill", "decode"):
            got, said = getattr(peaks, phase), totals[phase]
            size = 2**20
            held = weights + sum(
                t.size_bytes
                for t in terms
                if t.name in ("kv_cache", "recurrent_state") and t.phase in (phase, "always")
            )
            print(
                f"{kind:14}{phase:9} measured {got / size:8.2f} MiB  predicted {said / size:8.2f}"
                f"  {100 * (said / got - 1):+6.1f} %  of it temporary"
                f" {100 * ((said - held) / max(1, got - held) - 1):+7.1f} %"
                f"  {peaks.seconds:6.2f} s",
                flush=True,
            )
        del model
        mx.clear_cache()


if __name__ == "__main__":
    main()
