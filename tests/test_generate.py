"""Generation: mlx-lm's tokens, our bounds; stops, thinking, drafts and interruption."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

import mlx_lm  # noqa: E402
from models import CONFIGS, saved_model  # noqa: E402

from uma.errors import CheckpointError, UsageError  # noqa: E402
from uma.runtime.answer import Answer  # noqa: E402
from uma.runtime.cache import PromptCache, held_tokens, prompt_cache  # noqa: E402
from uma.runtime.generate import (  # noqa: E402
    Draft,
    Piece,
    Sampling,
    Settings,
    Stats,
    generate,
    sampling_defaults,
)
from uma.runtime.load import LoadedModel, load  # noqa: E402

PROMPT = [5 + i % 300 for i in range(70)]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    """Every kind, with no end of sequence, so that answers have the length that a test wants."""
    folder = tmp_path_factory.mktemp("models")
    models = {}
    for kind in CONFIGS:
        models[kind] = load(saved_model(kind, folder / kind))
        models[kind].tokenizer.eos_token_ids = set()
    return models


def fresh(model: LoadedModel, context_tokens: int = 256) -> PromptCache:
    return prompt_cache(model.model, context_tokens=context_tokens)


def run(
    model: LoadedModel, cache: PromptCache, prompt: list[int] = PROMPT, **settings: Any
) -> tuple[list[Piece], Stats]:
    *pieces, last = generate(model, prompt, cache, Settings(**settings))
    assert last.stats is not None
    return pieces, last.stats


def tokens(pieces: list[Piece]) -> list[int]:
    return [p.token for p in pieces if p.token is not None]


def text(pieces: list[Piece]) -> str:
    return "".join(p.text for p in pieces)


def reference(model: LoadedModel, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens of mlx-lm's own command path."""
    stream = mlx_lm.stream_generate(model.model, model.tokenizer, prompt, max_tokens=count)
    return [response.token for response in stream]


@pytest.mark.parametrize("kind", CONFIGS)
def test_greedy_tokens_are_those_of_mlx_lm(kind: str, loaded: dict[str, LoadedModel]) -> None:
    model = loaded[kind]
    expected = reference(model, PROMPT, 64)
    cache = fresh(model)

    pieces, stats = run(model, cache, max_tokens=64, prefill_step_size=32)

    assert tokens(pieces) == expected
    assert stats.reused_tokens == 0
    assert cache.tokens == PROMPT + expected


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_second_turn_processes_only_what_is_new_and_answers_the_same(
    kind: str, loaded: dict[str, LoadedModel]
) -> None:
    model = loaded[kind]
    cache = fresh(model)
    first, _ = run(model, cache, max_tokens=10)
    second = [*PROMPT, *tokens(first), 9, 8, 7]
    seen: list[tuple[int, int]] = []

    *pieces, last = generate(
        model,
        second,
        cache,
        Settings(max_tokens=64),
        on_prefill=lambda done, total: seen.append((done, total)),
    )

    assert last.stats is not None
    assert last.stats.reused_tokens == 80
    assert seen[0] == (80, 83)
    assert seen[-1] == (83, 83)
    assert tokens(pieces) == reference(model, second, 64)


def test_eight_bit_caches_give_the_same_tokens_until_the_logits_are_close(
    loaded: dict[str, LoadedModel],
) -> None:
    model = loaded["full"]
    cache = prompt_cache(model.model, context_tokens=256, kv_bits=8, kv_group_size=32)
    exact, _ = run(model, fresh(model), max_tokens=64, logprobs=True)
    rounded, _ = run(model, cache, max_tokens=64, logprobs=True)
    for ours, theirs in zip(rounded, exact, strict=True):
        if ours.token is None or theirs.token is None:
            continue
        assert mx.abs(ours.logprobs - theirs.logprobs).max().item() < 0.05
        best = mx.sort(theirs.logprobs)[-2:].tolist()
        if best[1] - best[0] < 0.1:
            break
        assert ours.token == theirs.token


def test_the_text_is_that_of_the_tokenizer(loaded: dict[str, LoadedModel]) -> None:
    model = loaded["hybrid"]
    pieces, _ = run(model, fresh(model), max_tokens=40)
    expected = model.tokenizer.decode(tokens(pieces))
    assert text(pieces) == expected.removeprefix(" ")


def test_an_answer_ends_at_the_end_of_sequence(loaded: dict[str, LoadedModel]) -> None:
    model = loaded["full"]
    free, _ = run(model, fresh(model), max_tokens=20)
    eos = tokens(free)[7]
    model.tokenizer.eos_token_ids = {eos}
    try:
        cache = fresh(model)
        pieces, stats = run(model, cache, max_tokens=20)
    finally:
        model.tokenizer.eos_token_ids = set()
    first = tokens(free).index(eos)
    assert tokens(pieces) == tokens(free)[: first + 1]
    assert stats.finish_reason == "stop"
    assert cache.tokens == PROMPT + tokens(pieces)


@pytest.mark.parametrize(
    ("max_tokens", "context", "count", "reason"),
    [
        (5, 256, 5, "length"),
        (None, 80, 10, "context"),
        (30, 80, 10, "context"),
        (1, 256, 1, "length"),
    ],
)
def test_the_reason_for_the_end_is_told(
    max_tokens: int | None,
    context: int,
    count: int,
    reason: str,
    loaded: dict[str, LoadedModel],
) -> None:
    model = loaded["full"]
    _, stats = run(model, fresh(model, context), max_tokens=max_tokens)
    assert (stats.generation_tokens, stats.finish_reason) == (count, reason)
    assert (stats.generation_tps is None) == (count == 1)


def test_a_prompt_that_fills_the_context_is_refused_with_one_that_fits(
    loaded: dict[str, LoadedModel],
) -> None:
    for context in (69, 70):
        with pytest.raises(UsageError, match="--context 326"):
            run(loaded["full"], fresh(loaded["full"], context))
    with pytest.raises(UsageError, match="empty"):
        run(loaded["full"], fresh(loaded["full"]), prompt=[])
    with pytest.raises(UsageError, match="at least 1"):
        run(loaded["full"], fresh(loaded["full"]), max_tokens=0)


def say(
    model: LoadedModel, words: str, stop: tuple[str, ...] = (), prompt: str = "Hi"
) -> tuple[str, str, str | None]:
    """What is shown, what is thought, and why it ends, when the model says ``words``."""
    tokenizer = model.tokenizer
    ids = tokenizer.encode(words, add_special_tokens=False)
    made = Answer(
        tokenizer, tokenizer.encode(prompt, add_special_tokens=False), len(ids) + 1, None, stop
    )
    segments = []
    for token in ids:
        segments += made.add(token)
        if made.finish_reason:
            break
    segments += made.rest()
    shown = "".join(s.text for s in segments if not s.thinking)
    thought = "".join(s.text for s in segments if s.thinking)
    return shown, thought, made.finish_reason


def test_a_stop_string_ends_the_answer_wherever_its_tokens_begin(
    loaded: dict[str, LoadedModel],
) -> None:
    model = loaded["full"]
    assert say(model, "The capital is Paris. More", ("ital is Pa",)) == ("The cap", "", "stop")
    assert say(model, "one two three", ("four", "two")) == ("one ", "", "stop")


def test_the_beginning_of_a_stop_string_is_shown_if_it_does_not_go_on(
    loaded: dict[str, LoadedModel],
) -> None:
    assert say(loaded["full"], "an END", ("ENDING",)) == ("an END", "", None)
    assert say(loaded["full"], "aaab", ("aab",)) == ("a", "", "stop")


def test_thinking_is_told_from_the_answer(loaded: dict[str, LoadedModel]) -> None:
    words = "<think>hm, Paris</think>Paris."
    assert say(loaded["full"], words) == ("Paris.", "hm, Paris", None)


def test_a_template_may_open_the_thinking_itself(loaded: dict[str, LoadedModel]) -> None:
    opened, closed = "Hi<think>\n", "Hi<think>\n\n</think>\n\n"
    assert say(loaded["full"], "hm</think>Yes", prompt=opened) == ("Yes", "hm", None)
    assert say(loaded["full"], "Yes", prompt=closed) == ("Yes", "", None)


def test_characters_of_several_tokens_come_whole(loaded: dict[str, LoadedModel]) -> None:
    words = "naïve 日本語 🦙 done"
    assert say(loaded["full"], words)[0] == words


def test_a_seed_repeats_an_answer_and_another_changes_it(loaded: dict[str, LoadedModel]) -> None:
    model = loaded["full"]

    def drawn(seed: int) -> list[int]:
        sampling = Sampling(temp=1.0, top_p=0.95, top_k=10_000, min_p=0.01, seed=seed)
        return tokens(run(model, fresh(model), max_tokens=20, sampling=sampling)[0])

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, Sampling()),
        ({}, Sampling()),
        ({"do_sample": True}, Sampling(temp=1.0)),
        ({"do_sample": False, "temperature": 0.6}, Sampling()),
        ({"do_sample": True, "temperature": 0}, Sampling()),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1},
            Sampling(temp=0.6, top_p=0.95, top_k=20, min_p=0.1),
        ),
    ],
)
def test_sampling_comes_from_generation_config(
    config: dict[str, Any] | None, expected: Sampling, tmp_path: Path
) -> None:
    if config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert sampling_defaults(tmp_path) == expected


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"temperature": "warm"}', '{"temperature": NaN}', '{"top_p": 2}'],
)
def test_a_broken_generation_config_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        sampling_defaults(tmp_path)


def test_a_generation_config_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "generation_config.json").write_text("{}")

    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(CheckpointError, match="Permission denied"):
        sampling_defaults(tmp_path)


def test_a_prompt_that_shares_nothing_starts_with_an_empty_cache(
    loaded: dict[str, LoadedModel],
) -> None:
    model = loaded["full"]
    cache = fresh(model, 1024)
    run(model, cache, [5] * 600, max_tokens=2)
    _, stats = run(model, cache, [6] * 10, max_tokens=2)
    token = 4 * 2 * 2 * 32 * 4  # layers, keys and values, heads of 32, float32
    assert (stats.reused_tokens, stats.cache_bytes) == (0, 256 * token)


@pytest.mark.parametrize("kind", ["full", "hybrid", "recurrent"])
def test_ctrl_c_while_generating_leaves_a_usable_cache(
    kind: str, loaded: dict[str, LoadedModel]
) -> None:
    model = loaded[kind]
    cache = fresh(model)
    steps = generate(model, PROMPT, cache, Settings(max_tokens=40))
    said = tokens([next(steps) for _ in range(5)])
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        next(steps)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert cache.tokens == PROMPT + said
    assert held_tokens(cache) in (len(cache.tokens), None)
    again = [*cache.tokens, 9, 8]
    pieces, stats = run(model, cache, again, max_tokens=10)
    assert stats.reused_tokens == len(PROMPT) + 5
    assert tokens(pieces) == reference(model, again, 10)


@pytest.mark.parametrize("kind", ["full", "hybrid", "recurrent"])
def test_ctrl_c_between_two_chunks_of_the_prompt_keeps_the_first(
    kind: str, loaded: dict[str, LoadedModel]
) -> None:
    model = loaded[kind]
    cache = fresh(model)

    def interrupt(done: int, total: int) -> None:
        if done == 32:
            os.kill(os.getpid(), signal.SIGINT)

    steps = generate(model, PROMPT, cache, Settings(prefill_step_size=32), on_prefill=interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(steps)
    assert cache.tokens == PROMPT[:32]
    pieces, stats = run(model, cache, max_tokens=10)
    assert stats.reused_tokens == 32
    assert tokens(pieces) == reference(model, PROMPT, 10)


def test_a_second_ctrl_c_interrupts_at_once_and_empties_the_cache(
    loaded: dict[str, LoadedModel],
) -> None:
    model = loaded["full"]
    cache = fresh(model)

    def interrupt(done: int, total: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        list(generate(model, PROMPT, cache, on_prefill=interrupt))
    assert cache.tokens == []
    assert held_tokens(cache) == 0


def test_an_error_in_the_middle_empties_the_cache(loaded: dict[str, LoadedModel]) -> None:
    model = loaded["full"]
    cache = fresh(model)

    def fail(done: int, total: int) -> None:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        list(generate(model, PROMPT, cache, on_prefill=fail))
    assert cache.tokens == []


def test_leaving_early_keeps_what_was_said(loaded: dict[str, LoadedModel]) -> None:
    model = loaded["full"]
    cache = fresh(model)
    steps = generate(model, PROMPT, cache, Settings(max_tokens=40))
    said = [next(steps).token for _ in range(3)]
    steps.close()  # type: ignore[attr-defined]
    assert cache.tokens == [*PROMPT, *said]


def test_the_pool_is_empty_afterwards_and_phases_are_announced(
    loaded: dict[str, LoadedModel],
) -> None:
    model = loaded["full"]
    phases: list[str] = []
    cache = fresh(model)
    list(generate(model, PROMPT, cache, Settings(max_tokens=3), on_phase=phases.append))
    assert phases == ["prefill", "decode", "end"]
    assert mx.get_cache_memory() < 1 << 16  # MLX would keep up to 32 MiB


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = saved_model("full", tmp_path_factory.mktemp("small"), seed=1, num_hidden_layers=1)
    return load(folder)


@pytest.mark.parametrize("num_draft_tokens", [1, 3])
def test_a_draft_model_changes_no_greedy_token(
    num_draft_tokens: int, loaded: dict[str, LoadedModel], small: LoadedModel
) -> None:
    model = loaded["full"]
    for draft_model in (small, model):  # one that is nearly always wrong, one always right
        cache, draft = fresh(model), Draft(draft_model, fresh(draft_model))
        prompt = PROMPT
        for _ in range(2):
            settings = Settings(max_tokens=30, num_draft_tokens=num_draft_tokens)
            *pieces, last = generate(model, prompt, cache, settings, draft=draft)
            assert tokens(pieces) == reference(model, prompt, 30)
            assert last.stats is not None
            held = held_tokens(cache)
            assert held == len(cache.tokens) >= len(prompt) + 29
            assert held_tokens(draft.cache) == len(draft.cache.tokens)
            assert cache.tokens == (prompt + tokens(pieces))[:held]
            prompt = [*prompt, *tokens(pieces), 9, 8]
        assert last.stats.reused_tokens > len(PROMPT)
        # A draft that is always right gives n of n + 1 tokens.
        right = 30 * num_draft_tokens // (num_draft_tokens + 1) - 1
        assert (last.stats.draft_tokens >= right) == (draft_model is model)
        assert last.stats.prefill_cache_bytes > 0


def test_speculation_stays_within_the_context(
    loaded: dict[str, LoadedModel], small: LoadedModel
) -> None:
    model = loaded["full"]
    cache, draft = fresh(model, 80), Draft(model, fresh(model, 80))
    *_, last = generate(model, PROMPT, cache, draft=draft)
    assert last.stats is not None
    assert last.stats.generation_tokens == 10
    assert (held_tokens(cache) or 0) <= 80


@pytest.mark.parametrize("kind", ["sliding", "hybrid", "recurrent"])
def test_speculation_is_refused_where_a_cache_cannot_forget(
    kind: str, loaded: dict[str, LoadedModel], small: LoadedModel
) -> None:
    model = loaded[kind]
    with pytest.raises(UsageError, match="without --draft-model"):
        list(generate(model, PROMPT, fresh(model), draft=Draft(small, fresh(small))))


def test_a_draft_with_another_vocabulary_is_refused(
    loaded: dict[str, LoadedModel], small: LoadedModel
) -> None:
    model = loaded["full"]

    class Other:
        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

    other = replace(small, tokenizer=Other())
    with pytest.raises(UsageError, match="another vocabulary"):
        list(generate(model, PROMPT, fresh(model), draft=Draft(other, fresh(small))))
