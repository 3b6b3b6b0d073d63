"""Every figure of docs/memory.md, computed anew by the library that the page explains."""

import json
import re
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")

from uma.architecture import architecture_from_config
from uma.architecture.layers import Architecture, Attention
from uma.catalog import aliases, find_model, model_config, words
from uma.cli import main
from uma.engines import llama_cpp, mlx, transformers
from uma.engines.cuda import CUDA_CONTEXT
from uma.machine import Machine, budget_of
from uma.machine.named import machine_named
from uma.memory.activations import Call, output_width, score_bytes
from uma.memory.paging import Holding, mean_holding, parse_requests
from uma.memory.weights import weight_bytes
from uma.plan.engine_case import LLAMA_CPP_CONTEXT
from uma.quantization import Quantization
from uma.units import GB, format_gib
from uma.workload import Inference

PAGE = (Path(__file__).parent.parent / "docs/memory.md").read_text(encoding="utf-8")
FIGURE = re.compile(r"-?\d[\d,]*(?:\.\d+)? (?:GiB|MiB|KiB|GB|%|tokens/s)")
REQUESTS = "512+256x6,2048+512x3,6000+1000"  # as the page says in words
TRAINED = (
    ("weights in 16 bits", 2),
    ("gradients in 16 bits", 2),
    ("two moments of Adam in 32 bits", 8),
    ("master weights in 32 bits", 4),
)


@cache
def architecture_of(name: str) -> Architecture:
    (hf_id,) = aliases()[words(name)]
    model = find_model(hf_id)
    assert model is not None
    return architecture_from_config(model_config(model).values)


def cache_bytes(name: str, tokens: int, batch_size: int = 1, kv_bits: int | None = None) -> int:
    architecture = architecture_of(name)
    workload = Inference(tokens, batch_size=batch_size, kv_bits=kv_bits)
    terms = mlx.inference_terms(architecture, weight_bytes(architecture, Quantization()), workload)
    kept = [t for t in terms if t.name == "kv_cache" and t.phase == "decode"]
    return sum(t.size_bytes for t in kept)


def gb(size_bytes: int) -> str:
    return f"{size_bytes / GB:.2f} GB"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def weights_rows() -> list[tuple[str, ...]]:
    name, architecture = "Llama 3 8B", architecture_of("llama-3-8b")
    sizes = {
        "float32": transformers.weights_term(architecture, "fp32"),
        "bfloat16 or float16": transformers.weights_term(architecture, "bf16"),
        "MLX 8-bit, groups of 64": weight_bytes(architecture, Quantization(8)),
        "MLX 4-bit, groups of 64": weight_bytes(architecture, Quantization(4)),
        "llama.cpp Q4_K_M": llama_cpp.weights_term(architecture, "Q4_K_M"),
        "bitsandbytes nf4": transformers.weights_term(architecture, "nf4"),
    }
    return [
        (
            name,
            label,
            f"{8 * term.size_bytes / architecture.num_parameters:.2f}",
            gb(term.size_bytes),
            format_gib(term.size_bytes),
        )
        for label, term in sizes.items()
    ]


def cache_rows() -> list[tuple[str, ...]]:
    asked = [
        ("Llama 2 7B", "llama-2-7b", 8192, 1, None),
        ("Llama 2 7B", "llama-2-7b", 32_768, 1, None),
        ("Llama 2 7B", "llama-2-7b", 32_768, 4, None),
        ("Llama 2 7B", "llama-2-7b", 32_768, 1, 8),
        ("Llama 2 7B", "llama-2-7b", 32_768, 1, 4),
        ("Llama 3 8B", "llama-3-8b", 8192, 1, None),
        ("Llama 3 70B", "llama-3-70b", 8192, 1, None),
        ("Gemma 3 27B", "gemma-3-27b", 8192, 1, None),
        ("Gemma 3 27B", "gemma-3-27b", 131_072, 1, None),
        ("DeepSeek-V3", "deepseek-v3", 8192, 1, None),
        ("Qwen3-Next 80B", "qwen3-next-80b-a3b", 8192, 1, None),
    ]
    return [
        (
            label,
            f"{tokens:,}",
            str(batch),
            f"{bits or 16}-bit",
            format_gib(cache_bytes(name, tokens, batch, bits)),
        )
        for label, name, tokens, batch, bits in asked
    ]


def attention_rows() -> list[tuple[str, ...]]:
    """Scores of one layer of Llama 2 7B, and what a fused kernel writes instead."""
    layer = architecture_of("llama-2-7b").layers[0]
    (mixer,) = layer.mixers
    assert isinstance(mixer, Attention)
    rows: list[tuple[str, ...]] = []
    for tokens, chunk in ((2048, 2048), (8192, 8192), (32_768, 32_768), (32_768, 2048)):
        call = Call(chunk, tokens - chunk)
        rows.append(
            (
                f"{tokens:,}",
                f"{chunk:,}",
                format_gib(score_bytes(mixer, call)),
                format_gib(call.array(output_width(mixer))),
            )
        )
    return rows


def paging() -> Holding:
    return mean_holding(parse_requests(REQUESTS), max_model_len=8192)


def paging_rows() -> list[tuple[str, ...]]:
    found, slot = paging(), cache_bytes("llama-3-8b", 8192) // 8192
    return [
        (
            "contiguous, 8,192 tokens each",
            format_gib(found.contiguous_bytes(slot, 16)),
            percent(found.contiguous_waste),
        ),
        (
            "paged, blocks of 16",
            format_gib(found.paged_bytes(slot, 16)),
            percent(found.paged_waste),
        ),
    ]


def training_rows() -> list[tuple[str, ...]]:
    parameters = architecture_of("llama-2-7b").num_parameters
    rows = [(name, str(size), format_gib(size * parameters)) for name, size in TRAINED]
    whole = sum(size for _, size in TRAINED)
    return [*rows, ("together", str(whole), format_gib(whole * parameters))]


def machine_rows() -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name in ("macbook-air-m4-16", "mac-studio-m2-ultra-192", "rtx-4090"):
        machine = machine_named(name)
        budget = budget_of(machine)
        rows.append(
            (
                f"`{name}`",
                format_gib(machine.memory_bytes),
                limit(machine),
                format_gib(budget.reserve_bytes or 0),
                format_gib(budget.budget_bytes),
            )
        )
    return rows


def limit(machine: Machine) -> str:
    low = format_gib(machine.limit_bytes)
    high = machine.limit_high_bytes
    return low if high is None else f"{low.removesuffix(' GiB')} to {format_gib(high)}"


@cache
def printed(command: str) -> dict[str, Any]:
    """What the command that the page names prints, as JSON."""
    with redirect_stdout(StringIO()) as out:
        main([*command.split()[1:], "--json"])
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def example() -> dict[str, Any]:
    command = "uma estimate llama-3-8b --machine macbook-air-m4-16"
    assert f"`{command}`" in PAGE
    return printed(command)


def example_rows() -> list[tuple[str, ...]]:
    """Llama 3 8B in 4 bits at 8,192 tokens under MLX, as on a MacBook Air of 16 GiB."""
    found = example()
    rows = [
        (f"`{t['name']}`", t["phase"], format_gib(t["size_bytes"]), t["basis"])
        for t in found["terms"]
    ]
    total = format_gib(found["total_bytes"])
    return [*rows, ("peak", found["binding_phase"], total, found["verdict"])]


def needed() -> str:
    """The need of the example: its peak without the pool."""
    (pool,) = [t["size_bytes"] for t in example()["terms"] if t["name"] == "buffer_pool"]
    return format_gib(example()["total_bytes"] - pool)


TABLES = {
    "weights": weights_rows,
    "KV cache": cache_rows,
    "attention": attention_rows,
    "contiguous against paged": paging_rows,
    "limit and budget": machine_rows,
    "an example": example_rows,
    "training": training_rows,
}


def line(row: tuple[str, ...]) -> str:
    return f"| {' | '.join(row)} |"


@pytest.mark.parametrize("name", TABLES)
def test_each_row_of_the_page_is_what_the_library_computes(name: str) -> None:
    rows = [line(row) for row in TABLES[name]()]
    assert "\n".join(rows) in PAGE


def in_text() -> set[str]:
    """Figures that stand in sentences."""
    llama_2, llama_3 = architecture_of("llama-2-7b"), architecture_of("llama-3-8b")
    gemma, vocabulary = architecture_of("gemma-3-27b"), llama_3.vocab_size
    gemma_prefill = mlx.inference_terms(
        gemma, weight_bytes(gemma, Quantization()), Inference(8192)
    )[1]
    return {
        needed(),
        gb(2 * 8 * 10**9),  # the article's round number
        format_gib(cache_bytes("llama-2-7b", 8192) // 8192),
        format_gib(cache_bytes("llama-3-8b", 8192) // 8192),
        format_gib(gemma_prefill.size_bytes),
        format_gib(8192 * vocabulary * 4),
        format_gib(vocabulary * 2),
        format_gib(CUDA_CONTEXT),
        format_gib(LLAMA_CPP_CONTEXT),
        f"{16 * llama_2.num_parameters / GB:.0f} GB",
        percent(cache_bytes("llama-2-7b", 8192, kv_bits=8) / cache_bytes("llama-2-7b", 8192)),
        percent(cache_bytes("llama-2-7b", 8192, kv_bits=4) / cache_bytes("llama-2-7b", 8192)),
        format_gib(state_bytes("qwen3-next-80b-a3b")),
    }


def state_bytes(name: str) -> int:
    architecture = architecture_of(name)
    terms = mlx.inference_terms(architecture, weight_bytes(architecture), Inference())
    return sum(t.size_bytes for t in terms if t.name == "recurrent_state")


def test_every_figure_of_the_page_is_computed_here() -> None:
    computed = in_text()
    for rows in TABLES.values():
        computed |= set(FIGURE.findall("\n".join(map(line, rows()))))
    assert set(FIGURE.findall(PAGE)) - computed == set()
    assert in_text() - set(FIGURE.findall(PAGE)) == set()
