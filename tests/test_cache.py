"""Caches of every kind: what is quantized, what the context bounds, what can be rewound."""

from pathlib import Path
from typing import Any

import pytest

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

from mlx_lm.models.cache import make_prompt_cache  # noqa: E402
from models import CONFIGS, build_model, saved_model  # noqa: E402

from uma.errors import UmaError, UsageError  # noqa: E402
from uma.runtime.cache import (  # noqa: E402
    PromptCache,
    can_rewind,
    check_bound,
    held_tokens,
    never_forgets,
    prompt_cache,
    reset,
    reuse,
    rewind,
)
from uma.runtime.generate import Settings, generate  # noqa: E402
from uma.runtime.load import load  # noqa: E402

PROMPT = [5 + i % 300 for i in range(70)]

# What mlx-lm builds, and which layers its own code runs in quantized form: not rotating (gemma3,
# gpt_oss), chunked (llama4) or recurrent caches, not attention with sinks (gpt_oss), not the
# latent or expanded heads of MLA (deepseek_v3, minicpm3), of falcon_h1 the attention half.
QUANTIZED = {
    "full": "quantized 4 of 4 layers",
    "moe": "quantized 4 of 4 layers",
    "sliding": "quantized 1 of 4 layers",
    "sinks": "quantized 0 of 4 layers",
    "chunked": "quantized 1 of 4 layers",
    "latent": "quantized 0 of 4 layers",
    "expanded": "quantized 0 of 4 layers",
    "hybrid": "quantized 2 of 4 layers",
    "side_by_side": "quantized 4 of 4 layers",
    "recurrent": "quantized 0 of 2 layers",
}


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {kind: build_model(config) for kind, config in CONFIGS.items()}


def fill(model: Any, cache: PromptCache, tokens: list[int]) -> Any:
    logits = model(mx.array([tokens]), cache=cache.layers)
    mx.eval(logits, [layer.state for layer in cache.layers])
    cache.tokens += tokens
    return logits


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_layers_that_can_be_are_quantized_and_the_model_still_runs(
    kind: str, models: dict[str, Any]
) -> None:
    model = models[kind]
    cache = prompt_cache(model, context_tokens=128, kv_bits=8, kv_group_size=32)
    assert cache.summary == QUANTIZED[kind]

    plain = prompt_cache(model, context_tokens=128)
    quantized, exact = fill(model, cache, PROMPT), fill(model, plain, PROMPT)
    difference = mx.abs(quantized - exact).mean() / mx.abs(exact).mean()
    # Eight bits with groups of 32: a part in 256 of a group's range, through four layers.
    assert difference.item() < 0.01
    assert (cache.nbytes < plain.nbytes) == (cache.quantized_layers > 0)


@pytest.mark.parametrize("kind", CONFIGS)
def test_bytes_are_those_of_the_real_objects(kind: str, models: dict[str, Any]) -> None:
    cache = prompt_cache(models[kind], context_tokens=128)
    fill(models[kind], cache, PROMPT)
    theirs = make_prompt_cache(models[kind])
    mx.eval(models[kind](mx.array([PROMPT]), cache=theirs))
    assert cache.nbytes == sum(layer.nbytes for layer in theirs)


def test_recurrent_state_is_told_from_what_grows(models: dict[str, Any]) -> None:
    sizes = []
    for length in (20, 300):
        cache = prompt_cache(models["hybrid"], context_tokens=512)
        fill(models["hybrid"], cache, [7] * length)
        sizes.append((cache.state_nbytes, cache.nbytes - cache.state_nbytes))
    (short_state, short_rest), (long_state, long_rest) = sizes
    # Two layers, keys and values, 2 heads of 32, float32; room in steps of 256 tokens.
    assert short_state == long_state > 0
    assert (short_rest, long_rest) == (256 * 2 * 2 * 2 * 32 * 4, 512 * 2 * 2 * 2 * 32 * 4)


def test_only_widths_that_pack_whole_are_taken(models: dict[str, Any]) -> None:
    for bits in (3, 5, 6, 16):
        with pytest.raises(UsageError, match="2, 4, 8"):
            prompt_cache(models["full"], context_tokens=128, kv_bits=bits, kv_group_size=32)


def test_a_group_that_does_not_divide_the_head_is_refused(models: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="give --kv-group-size 32"):
        prompt_cache(models["full"], context_tokens=128, kv_bits=4, kv_group_size=64)


def test_a_layer_that_was_planned_but_cannot_be_quantized_is_an_error(
    models: dict[str, Any],
) -> None:
    with pytest.raises(UmaError, match=r"layers \[0\]"):
        prompt_cache(
            models["sliding"],
            context_tokens=128,
            kv_bits=8,
            kv_group_size=32,
            quantizable_layers=(0, 3),
        )


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_context_bounds_prompt_and_answer_on_every_architecture(
    kind: str, tmp_path: Path
) -> None:
    loaded = load(saved_model(kind, tmp_path))
    loaded.tokenizer.eos_token_ids = set()
    cache = prompt_cache(loaded.model, context_tokens=90)

    *_, last = generate(loaded, PROMPT, cache, Settings(prefill_step_size=16))

    assert last.stats is not None
    assert last.stats.finish_reason == "context"
    assert last.stats.prompt_tokens + last.stats.generation_tokens == 90
    assert held_tokens(cache) in (90, None)
    assert len(cache.tokens) == 90
    check_bound(cache)


def test_a_cache_beyond_the_context_is_found_out(models: dict[str, Any]) -> None:
    cache = prompt_cache(models["full"], context_tokens=69)
    fill(models["full"], cache, PROMPT)
    with pytest.raises(UmaError, match="70 tokens"):
        check_bound(cache)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_rewound_cache_gives_the_logits_of_a_fresh_one_or_refuses(
    kind: str, models: dict[str, Any]
) -> None:
    model = models[kind]
    cache = prompt_cache(model, context_tokens=256)
    fill(model, cache, PROMPT)
    more = [9, 8, 7]
    if not rewind(cache, 60):
        assert len(cache.tokens) == 70
        reset(cache)
        fill(model, cache, PROMPT[:60])
    fresh = prompt_cache(model, context_tokens=256)
    fill(model, fresh, PROMPT[:60])
    assert mx.allclose(fill(model, cache, more), fill(model, fresh, more), atol=1e-4).item()
    assert cache.tokens == fresh.tokens


REWINDS_AT_70 = {"full", "moe", "latent", "expanded"}


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_can_be_rewound_depends_on_what_was_dropped(kind: str, models: dict[str, Any]) -> None:
    cache = prompt_cache(models[kind], context_tokens=256)
    fill(models[kind], cache, PROMPT[:20])
    within_window = can_rewind(cache, 5)
    for part in (PROMPT[20:50], PROMPT[50:]):  # llama4 drops the front before it processes
        fill(models[kind], cache, part)
    assert can_rewind(cache, 5) == (kind in REWINDS_AT_70)
    assert within_window == (kind in REWINDS_AT_70 | {"sliding", "sinks", "chunked"})


def test_a_window_within_the_context_forbids_speculation(models: dict[str, Any]) -> None:
    assert not never_forgets(prompt_cache(models["full"], context_tokens=64))
    assert never_forgets(prompt_cache(models["sliding"], context_tokens=64))
    assert not never_forgets(prompt_cache(models["sliding"], context_tokens=31))
    assert never_forgets(prompt_cache(models["hybrid"], context_tokens=31))


def test_reuse_keeps_the_common_prefix_and_leaves_a_token_to_process(
    models: dict[str, Any],
) -> None:
    cache = prompt_cache(models["full"], context_tokens=256)
    fill(models["full"], cache, PROMPT)
    assert reuse(cache, [*PROMPT, 1, 2]) == 70
    assert reuse(cache, [*PROMPT[:50], 999, 1]) == 50
    assert held_tokens(cache) == 50
    assert reuse(cache, PROMPT[:50]) == 49
    assert reuse(cache, [999]) == 0
    assert cache.tokens == []


def test_a_cache_that_cannot_be_rewound_starts_anew(models: dict[str, Any]) -> None:
    cache = prompt_cache(models["hybrid"], context_tokens=256)
    fill(models["hybrid"], cache, PROMPT)
    assert reuse(cache, [*PROMPT, 1, 2]) == 70
    assert reuse(cache, [*PROMPT[:50], 999, 1]) == 0
    assert held_tokens(cache) == 0


def test_layers_trimmed_by_different_amounts_are_an_error(models: dict[str, Any]) -> None:
    cache = prompt_cache(models["full"], context_tokens=256)
    fill(models["full"], cache, PROMPT)
    cache.layers[2].trim = lambda n: n - 1
    with pytest.raises(UmaError, match="trimmed by"):
        rewind(cache, 60)
