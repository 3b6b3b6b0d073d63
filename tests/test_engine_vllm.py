"""The vLLM engine against what its own logs printed and its source computes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from uma.architecture import architecture_from_config
from uma.architecture.layers import Architecture
from uma.engines import transformers
from uma.engines import vllm as engine
from uma.engines.vllm_cache import CacheBlocks, LayerSpec, cache_blocks
from uma.errors import DoesNotFit, UnknownName, UsageError
from uma.ledger import peak
from uma.memory.term import MemoryTerm
from uma.units import GIB
from uma.workload import Inference

MODELS = Path(engine.__file__).parent.parent / "data" / "models"
NOTHING = MemoryTerm("weights", 0, "exact", "")


def catalog(name: str) -> Architecture:
    return architecture_from_config(json.loads((MODELS / f"{name}.json").read_text()))


LLAMA = catalog("meta-llama__Meta-Llama-3.1-8B")


def test_weights_of_llama_8b_are_what_the_log_prints() -> None:
    """14.96 GiB by pull request 10511, 14.9888 with the allocator's rounding by issue 10517."""
    assert engine.weights_term(LLAMA, "bf16").size_bytes / GIB == pytest.approx(14.96, abs=0.005)


def test_weights_of_a_70b_in_w8a8_are_what_the_log_prints() -> None:
    """67.7229: vllm-project/vllm pull request 12569."""
    model = catalog("meta-llama__Meta-Llama-3.1-70B")
    size = engine.weights_term(model, "compressed-tensors-w8a8").size_bytes
    assert size / GIB == pytest.approx(67.7229, rel=0.002)


@pytest.mark.parametrize(("tokens", "peak_gib"), [(20_000, 17.06), (29_000, 17.98)])
def test_activations_of_a_profile_run_are_what_the_log_prints(tokens: int, peak_gib: float) -> None:
    """Torch's peak less 14.9888 of weights, the whole context in one batch: issue 10517."""
    settings = engine.Settings(max_num_batched_tokens=tokens)
    terms = engine.inference_terms(LLAMA, NOTHING, Inference(tokens), settings)
    found = next(t for t in terms if t.name == "activations" and t.phase == "prefill")
    assert found.size_bytes / GIB == pytest.approx(peak_gib - 14.9888, rel=0.02)


@pytest.mark.parametrize(("tokens", "blocks"), [(20_000, 1952), (29_000, 1478)])
def test_blocks_that_fit_a_card_are_what_the_log_prints(tokens: int, blocks: int) -> None:
    """RTX 3090 with 23.58 GiB at 0.9, graphs not counted by that version: issue 10517."""
    settings = engine.Settings(
        gpu_memory_utilization=0.9,
        max_num_batched_tokens=tokens,
        enforce_eager=True,
    )
    weights = engine.weights_term(LLAMA, "bf16")
    found = engine.num_blocks(LLAMA, weights, int(23.58 * GIB), settings)
    assert found == pytest.approx(blocks, rel=0.03)


def test_tokens_of_a_cache_are_what_the_log_prints() -> None:
    """Llama 2 7B on an A100: 7,351 blocks of 16 are 57.4 GiB (pull request 2031)."""
    model = catalog("meta-llama__Llama-2-7b-chat-hf")
    held = engine.sequence_blocks(model, 7351 * 16)
    assert held.blocks == 7351
    assert held.size_bytes == 7351 * 16 * 512 * 1024


def test_blocks_hold_sixteen_tokens() -> None:
    one, two = (engine.sequence_blocks(LLAMA, tokens) for tokens in (16, 17))
    assert (one.blocks, two.blocks) == (1, 2)
    assert one.size_bytes == 16 * 32 * 2 * 8 * 128 * 2


def test_latent_attention_caches_the_latent() -> None:
    """0.536 GiB for DeepSeek-V3 at 8,192 tokens."""
    held = engine.sequence_blocks(catalog("deepseek-ai__DeepSeek-V3"), 8192)
    assert held.size_bytes == 8192 * 61 * (512 + 64) * 2
    assert held.size_bytes / GIB == pytest.approx(0.536, abs=0.001)


def test_latent_attention_keeps_copies_of_its_projection() -> None:
    model = catalog("deepseek-ai__DeepSeek-V3")
    more = engine.weights_term(model, "bf16").size_bytes
    assert more - transformers.weights_term(model, "bf16").size_bytes == 61 * 512 * 128 * 256 * 2


def test_layers_of_two_kinds_share_a_pool_of_equal_groups() -> None:
    """gpt-oss-20b: 12 full layers and 12 of window 128, as kv_cache_planning.py groups them."""
    settings = engine.Settings(max_num_batched_tokens=64, async_scheduling=False)
    held = engine.sequence_blocks(catalog("openai__gpt-oss-20b"), 4096, settings)
    assert held.block_bytes == 12 * 16 * 2 * 8 * 64 * 2
    assert held.blocks == 4096 // 16 + -(-(127 + 64) // 16) + 1


def test_windows_do_not_grow_with_context_but_hold_the_batches_in_flight() -> None:
    model = catalog("google__gemma-3-4b-it")
    short, long = (engine.sequence_blocks(model, tokens) for tokens in (8192, 16384))
    # 29 sliding and 5 full layers: six groups of five sliding ones and one full.
    assert long.blocks - short.blocks == 8192 // 16
    assert short.blocks == 512 + 6 * (-(-(1023 + 4096) // 16) + 1)


def test_pages_of_attention_are_as_large_as_the_states_of_a_hybrid() -> None:
    held = engine.sequence_blocks(catalog("Qwen__Qwen3-Next-80B-A3B-Instruct"), 4096)
    state = 3 * 8192 * 2 + 32 * 128 * 128 * 4
    token = 2 * 2 * 256 * 2
    assert held.page_tokens == -(-state // (16 * token)) * 16
    # 36 recurrent and 12 full layers: three groups of states and one of attention.
    assert held.blocks == 3 + -(-4096 // held.page_tokens)


def test_kinds_of_nearly_equal_number_are_padded_to_one_group_each() -> None:
    """kv_cache_planning.py's example: 12 sliding and 13 full layers make groups of 13."""
    specs = [LayerSpec("sliding", 64, 128)] * 12 + [LayerSpec("full", 64)] * 13
    held = cache_blocks(specs, 1024, 16, in_flight=0)
    assert held == CacheBlocks(64 + 9, 13 * 16 * 64, 16)


def test_smaller_pages_take_more_tokens_until_all_are_as_large() -> None:
    specs = [LayerSpec("sliding", 64, 128), LayerSpec("full", 32)]
    held = cache_blocks(specs, 1024, 16, in_flight=0)
    assert held == CacheBlocks(1024 // 32 + 9, 16 * 64, 16)


def test_an_fp8_cache_is_half_as_large() -> None:
    half = engine.sequence_blocks(LLAMA, 4096, engine.Settings(kv_cache_dtype="fp8"))
    assert 2 * half.size_bytes == engine.sequence_blocks(LLAMA, 4096).size_bytes


def test_captured_sizes_are_those_of_the_source() -> None:
    sizes = list(engine.capture_sizes())
    assert sizes[:5] == [1, 2, 4, 8, 16]
    assert sizes[-3:] == [480, 496, 512]
    assert len(sizes) == 51


def test_what_is_reserved_is_the_setting_and_not_the_need() -> None:
    assert engine.reserved_bytes(80 * GIB) == int(0.92 * 80 * GIB)
    need = peak(engine.inference_terms(LLAMA, NOTHING, Inference(8192)))[1]
    assert need < engine.reserved_bytes(80 * GIB) / 4


def test_more_context_and_more_sequences_never_need_less() -> None:
    for name in ("openai__gpt-oss-20b", "Qwen__Qwen3-Next-80B-A3B-Instruct"):
        model = catalog(name)
        sizes = [
            peak(engine.inference_terms(model, NOTHING, Inference(tokens, batch_size=batch)))[1]
            for batch in (1, 2, 8)
            for tokens in (1, 128, 4096, 65536)
        ]
        assert sizes[:4] == sorted(sizes[:4])
        assert all(sizes[i] <= sizes[i + 4] for i in range(8))


def test_a_card_too_small_for_the_weights_is_said() -> None:
    weights = engine.weights_term(LLAMA, "bf16")
    with pytest.raises(DoesNotFit, match="gpu_memory_utilization"):
        engine.num_blocks(LLAMA, weights, 16 * GIB)


def test_unknown_formats_and_cache_widths_are_errors() -> None:
    with pytest.raises(UnknownName, match="awq"):
        engine.weights_term(LLAMA, "Q4_K_M")
    with pytest.raises(UsageError, match="4 bits"):
        engine.inference_terms(LLAMA, NOTHING, Inference(kv_bits=4))
    fp8 = replace(engine.DEFAULTS, kv_cache_dtype="fp8")
    assert engine.inference_terms(LLAMA, NOTHING, Inference(kv_bits=8), fp8)
    assert all(engine.weights_term(LLAMA, name).size_bytes for name in engine.formats())
