"""Bytes of caches, against mlx-lm's own cache objects fed with real arrays and real models."""

from importlib import import_module
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("mlx_lm")

import mlx.core as mx
from mlx_lm.models import cache as mlx_cache
from oracle.build import cache_bytes_of_a_run, runnable
from oracle.tiny import TINY

from uma.architecture import REMAPPING, WRAPPERS, architecture_from_config
from uma.architecture.families import MODULES
from uma.engines.mlx_cache import UNIFORM, kv_quantization, layer_caches
from uma.errors import UsageError
from uma.memory.kv_cache import (
    CacheBytes,
    LayerCache,
    StateCache,
    TokenCache,
    cache_bytes,
    calls,
    state_bytes,
)

WIDTHS = ((2, 64), (2, 32))


def fed(cache: Any, prompt: int, step: int, generated: int) -> CacheBytes:
    """Bytes of an mlx-lm cache that is fed as ``generate_step`` feeds it."""
    sizes = []
    for tokens in [*calls(prompt, step), *[1] * generated]:
        if isinstance(cache, mlx_cache.ChunkedKVCache):
            cache.maybe_trim_front()
        keys, values = (mx.zeros((1, heads, tokens, dim), mx.bfloat16) for heads, dim in WIDTHS)
        cache.update_and_fetch(keys, values)
        sizes.append(cache.nbytes)
    prefill = len(list(calls(prompt, step)))
    return CacheBytes(max(sizes[:prefill]), sizes[prefill - 1], sizes[-1])


def ours(cache: TokenCache, prompt: int, step: int, generated: int) -> CacheBytes:
    return cache_bytes([LayerCache(0, (cache,))], prompt, step, generated)


lengths = st.tuples(
    st.integers(1, 1500),
    st.sampled_from([64, 100, 256, 300, 512, 2048]),
    st.sampled_from([0, 1, 7, 255, 256, 257, 600]),
)
many = settings(max_examples=40, deadline=None)


@many
@given(lengths)
def test_full_caches_hold_what_mlx_lms_hold(length: tuple[int, int, int]) -> None:
    assert ours(TokenCache("KVCache", WIDTHS), *length) == fed(mlx_cache.KVCache(), *length)


@many
@given(lengths, st.sampled_from([16, 96, 256, 300, 1024]), st.sampled_from([0, 4]))
def test_rotating_caches_hold_what_mlx_lms_hold(
    length: tuple[int, int, int], window: int, keep: int
) -> None:
    cache = TokenCache("RotatingKVCache", WIDTHS, window)
    assert ours(cache, *length) == fed(mlx_cache.RotatingKVCache(window, keep), *length)


@many
@given(lengths, st.sampled_from([96, 256, 512, 1000]))
def test_chunked_caches_hold_what_mlx_lms_hold(length: tuple[int, int, int], chunk: int) -> None:
    cache = TokenCache("ChunkedKVCache", WIDTHS, chunk)
    assert ours(cache, *length) == fed(mlx_cache.ChunkedKVCache(chunk), *length)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("length", [(1, 64, 0), (300, 100, 20), (601, 256, 300)])
def test_quantized_caches_hold_what_mlx_lms_hold(bits: int, length: tuple[int, int, int]) -> None:
    cache = TokenCache("KVCache", WIDTHS, kv_bits=bits, kv_group_size=32)
    assert ours(cache, *length) == fed(mlx_cache.QuantizedKVCache(32, bits), *length)


def test_odd_chunks_leave_odd_sizes() -> None:
    cache = TokenCache("KVCache", ((1, 1),))
    assert ours(cache, 601, 300, 0).prefill_end == (300 + 512 + 0) * 2


def test_a_sliding_layer_holds_window_and_step_in_prefill() -> None:
    cache = TokenCache("RotatingKVCache", ((1, 1),), 512)
    assert ours(cache, 8193, 2048, 0).prefill_peak == (512 + 2048 - 1) * 2
    assert ours(cache, 8193, 2048, 100).decode_end == 512 * 2


def test_long_generations_are_counted_without_walking_them() -> None:
    million = 1_000_000
    cache = TokenCache("ChunkedKVCache", ((1, 1),), 8192)
    assert ours(cache, 20_000, 2048, million) == ours(cache, 20_000, 2048, 2 * million)


def test_peaks_of_several_caches_are_of_one_moment() -> None:
    full, sliding = TokenCache("KVCache", WIDTHS), TokenCache("RotatingKVCache", WIDTHS, 96)
    both = cache_bytes([LayerCache(0, (full,)), LayerCache(1, (sliding,))], 3000, 512)
    apart = ours(full, 3000, 512, 0).prefill_peak + ours(sliding, 3000, 512, 0).prefill_peak
    assert both.prefill_peak <= apart
    assert both.prefill_end == sum(
        ours(cache, 3000, 512, 0).prefill_end for cache in (full, sliding)
    )


@pytest.mark.parametrize("module", TINY)
def test_a_running_model_holds_the_predicted_cache(module: str) -> None:
    config, length = TINY[module], (130, 100, 3)
    layers = layer_caches(architecture_from_config(config))
    states = state_bytes(layers)
    held = cache_bytes(layers, *length)
    predicted = (held.prefill_peak + states, held.prefill_end + states, held.decode_end + states)
    assert predicted == cache_bytes_of_a_run(config, *length)


RECURRENT = ["mamba", "mamba2", "falcon_h1", "granitemoehybrid", "nemotron_h", "lfm2"]


@pytest.mark.parametrize("module", RECURRENT)
def test_states_keep_the_arrays_that_they_are_views_of(module: str) -> None:
    growth, kept = _kept_by_a_call(module, tokens=256)
    assert growth == kept


def test_jambas_states_keep_those_of_every_token() -> None:
    growth, kept = _kept_by_a_call("jamba", tokens=256)
    one_state = 2 * 256 * 16 * 2  # layers, inner_size, state_size, bytes: counted once too often
    assert growth == kept - one_state


def _kept_by_a_call(module: str, tokens: int) -> tuple[int, int]:
    """Bytes that one call leaves in memory, and those that we predict."""
    config = TINY[module]
    layers = layer_caches(architecture_from_config(config))
    model = runnable(config)
    caches = mlx_cache.make_prompt_cache(model)
    limit = mx.set_cache_limit(0)
    mx.disable_compile()
    before = mx.get_active_memory()
    model(mx.ones((1, tokens), mx.int32), cache=caches)
    mx.eval([cache.state for cache in caches])
    growth = mx.get_active_memory() - before
    mx.enable_compile()
    mx.set_cache_limit(limit)
    slots = cache_bytes(layers, tokens, tokens).prefill_end
    return growth, slots + state_bytes(layers, call_tokens=tokens)


@pytest.mark.parametrize("module", ["llama", "gemma3_text", "llama4", "deepseek_v3"])
def test_a_running_model_outgrows_its_cache_as_predicted(module: str) -> None:
    config, length = TINY[module], (451, 150, 20)
    held = cache_bytes(layer_caches(architecture_from_config(config)), *length)
    predicted = (held.prefill_peak, held.prefill_end, held.decode_end)
    assert predicted == cache_bytes_of_a_run(config, *length)


@pytest.mark.parametrize("module", sorted(MODULES | WRAPPERS.keys()))
def test_a_module_is_uniform_where_mlx_lm_has_no_make_cache(module: str) -> None:
    model = import_module(f"mlx_lm.models.{module}").Model
    assert (module in UNIFORM) is not hasattr(model, "make_cache")


@pytest.mark.parametrize("module", TINY)
def test_a_model_runs_with_every_cache_quantized_that_we_say_can_be(module: str) -> None:
    config = TINY[module]
    architecture = architecture_from_config(config)
    model = runnable(config)
    caches = mlx_cache.make_prompt_cache(model)
    layers = layer_caches(architecture, kv_bits=8, kv_group_size=32)
    assert len(caches) == len(layers)
    caches = [_as_predicted(cache, layer) for cache, layer in zip(caches, layers, strict=True)]
    mx.disable_compile()
    for tokens in (40, 1):
        mx.eval(model(mx.ones((1, tokens), mx.int32), cache=caches))
    mx.enable_compile()
    held = cache_bytes(layers, 41, 64).prefill_end + state_bytes(layers)
    assert sum(cache.nbytes for cache in caches) == held


def _as_predicted(cache: Any, layer: LayerCache) -> Any:
    """An mlx-lm cache with its quantizable parts replaced; kinds must be the predicted ones."""
    parts = list(cache.caches) if isinstance(cache, mlx_cache.CacheList) else [cache]
    for i, (part, spec) in enumerate(zip(parts, layer.caches, strict=True)):
        kind = "ArraysCache" if isinstance(spec, StateCache) else spec.kind
        assert type(part).__name__ == kind
        if isinstance(spec, TokenCache) and spec.kv_bits is not None:
            parts[i] = mlx_cache.QuantizedKVCache(spec.kv_group_size, spec.kv_bits)
    if isinstance(cache, mlx_cache.CacheList):
        return mlx_cache.CacheList(*parts)
    return parts[0]


@pytest.mark.parametrize(
    ("module", "said", "reason"),
    [
        ("qwen3", "quantized 4 of 4 layers", None),
        ("gemma3_text", "quantized 2 of 4 layers", "sliding window"),
        ("gpt_oss", "quantized 0 of 4 layers", "attention sinks"),
        ("deepseek_v3", "quantized 0 of 4 layers", "latent"),
        ("qwen3_next", "quantized 1 of 4 layers", "recurrent state"),
        ("llama4", "quantized 1 of 4 layers", "chunked attention"),
    ],
)
def test_layers_kept_in_full_say_why(module: str, said: str, reason: str | None) -> None:
    plan = kv_quantization(architecture_from_config(TINY[module]), 32)
    assert str(plan) == said
    assert all(reason is not None and reason in kept for kept in plan.kept.values())


@pytest.mark.parametrize("bits", [1, 3, 5, 6, 16])
def test_widths_that_the_quantized_cache_cannot_pack_are_refused(bits: int) -> None:
    with pytest.raises(UsageError, match="2, 4, 8"):
        layer_caches(architecture_from_config(TINY["qwen3"]), kv_bits=bits)


def test_mlx_lm_cannot_fill_a_quantized_cache_of_six_bits() -> None:
    keys = mx.zeros((1, 2, 10, 128), mx.bfloat16)
    with pytest.raises(ValueError, match="broadcast"):
        mlx_cache.QuantizedKVCache(32, 6).update_and_fetch(keys, keys)


def test_a_head_that_is_not_whole_groups_is_kept_in_full() -> None:
    plan = kv_quantization(architecture_from_config(TINY["qwen2"]), 64)
    assert plan.layers == ()
    assert set(plan.kept.values()) == {"head dimension 32 is not whole groups of 64"}


def test_mlx_lm_cannot_quantize_the_layers_that_we_keep() -> None:
    model = runnable(TINY["gpt_oss"])
    caches = [mlx_cache.QuantizedKVCache(32, 8) for _ in model.layers]
    with pytest.raises(ValueError, match="sinks"):
        model(mx.ones((1, 8), mx.int32), cache=caches)


def test_remapped_types_share_a_module() -> None:
    config = {**TINY["llama"], "model_type": "mistral"}
    assert REMAPPING["mistral"] == "llama"
    assert layer_caches(architecture_from_config(config)) == layer_caches(
        architecture_from_config(TINY["llama"])
    )
