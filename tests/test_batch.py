"""Batches: mlx-lm's answers, each within the context, and an honest count of bytes."""

from pathlib import Path
from typing import Any

import pytest

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

from mlx_lm import batch_generate  # noqa: E402
from models import CONFIGS, saved_model  # noqa: E402

from uma.checkpoint.source import locate  # noqa: E402
from uma.cli.options import RunOptions  # noqa: E402
from uma.cli.plan import plan_of  # noqa: E402
from uma.errors import UsageError  # noqa: E402
from uma.machine import read_machine  # noqa: E402
from uma.runtime.batch import BatchAnswer, batch  # noqa: E402
from uma.runtime.generate import Settings  # noqa: E402
from uma.runtime.load import load  # noqa: E402
from uma.runtime.session import batch_ledger, open_session  # noqa: E402

PROMPTS = [[5] * 10, [6] * 100, [7] * 40, [9] * 20, [10, 11]]
BATCHED = [kind for kind in CONFIGS if kind != "chunked"]


@pytest.mark.parametrize("kind", BATCHED)
def test_a_batch_gives_the_tokens_of_mlx_lm_within_the_context(kind: str, tmp_path: Path) -> None:
    loaded = load(saved_model(kind, tmp_path))
    limits = [25, 20, 25, 25, 25]  # the second prompt leaves 20 tokens of 120
    theirs = batch_generate(
        loaded.model,
        loaded.tokenizer,
        PROMPTS,
        max_tokens=limits,
        completion_batch_size=3,
        prefill_batch_size=3,
        return_token_ids=True,
    )
    seen: dict[int, BatchAnswer] = {}

    result = batch(
        loaded,
        PROMPTS,
        context_tokens=120,
        settings=Settings(max_tokens=25),
        batch_size=3,
        on_answer=seen.__setitem__,
    )

    for answer, expected in zip(result.answers, theirs.token_ids, strict=True):
        assert list(answer.tokens[: len(expected)]) == expected
        assert len(answer.tokens) == len(expected) + (answer.finish_reason == "stop")
    assert [seen[i] for i in range(5)] == list(result.answers)
    assert result.answers[1].finish_reason in ("context", "stop")
    assert result.held_bytes >= result.used_bytes > 0
    assert result.paged_bytes >= result.used_bytes


def test_bytes_follow_from_lengths_and_shapes(tmp_path: Path) -> None:
    loaded = load(saved_model("full", tmp_path))
    loaded.tokenizer.eos_token_ids = set()
    settings = Settings(max_tokens=4)
    result = batch(loaded, [[5] * 10, [6] * 300], context_tokens=512, settings=settings)

    token = 4 * 2 * 2 * 32 * 4  # layers, keys and values, heads of 32, float32
    # Both rows have room for 512 tokens when the long prompt has been read: a contiguous cache is
    # as wide as its longest sequence, in steps of 256.
    assert result.held_bytes == 2 * 512 * token
    assert result.used_bytes == (13 + 303) * token  # before the last token of four
    assert result.paged_bytes == (16 + 304) * token


def test_a_stop_string_ends_one_answer_and_not_the_others(tmp_path: Path) -> None:
    loaded = load(saved_model("full", tmp_path))
    loaded.tokenizer.eos_token_ids = set()
    free = batch(loaded, PROMPTS, context_tokens=200, settings=Settings(max_tokens=12))
    word = free.answers[0].text[2:5]
    settings = Settings(max_tokens=12, stop=(word,))
    stopped = batch(loaded, PROMPTS, context_tokens=200, settings=settings)
    assert stopped.answers[0].text == free.answers[0].text.split(word)[0]
    assert stopped.answers[0].finish_reason == "stop"
    for ours, theirs in zip(stopped.answers, free.answers, strict=True):
        assert ours.text == theirs.text.split(word)[0]


def test_what_cannot_be_batched_is_refused(tmp_path: Path) -> None:
    loaded = load(saved_model("chunked", tmp_path))
    with pytest.raises(UsageError, match="one by one"):
        batch(loaded, PROMPTS, context_tokens=200)
    with pytest.raises(UsageError, match="leaves no room"):
        batch(loaded, PROMPTS, context_tokens=100)


def test_no_more_sequences_are_held_at_once_than_were_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_lm.generate import BatchGenerator

    held: list[int] = []
    step = BatchGenerator.next

    def counted(engine: Any) -> Any:
        result = step(engine)
        held.append(len(engine._prompt_batch) + len(engine._generation_batch))
        return result

    monkeypatch.setattr(BatchGenerator, "next", counted)
    loaded = load(saved_model("full", tmp_path))
    loaded.tokenizer.eos_token_ids = set()
    prompts = [[5] * n for n in (4, 90, 4, 90, 50, 4, 90, 30, 4)]
    settings = Settings(max_tokens=9, prefill_step_size=16)
    batch(loaded, prompts, context_tokens=120, settings=settings, batch_size=4)
    assert max(held) <= 4  # a queue of all prompts would hold six here


@pytest.mark.parametrize("kind", ["full", "sliding", "hybrid"])
def test_what_a_batch_holds_stays_within_its_ledger(kind: str, tmp_path: Path) -> None:
    chosen = RunOptions(context=1500, batch_size=3, prefill_step_size=256)
    planned = plan_of(chosen, locate(str(saved_model(kind, tmp_path))), read_machine())
    settings = Settings(max_tokens=30, prefill_step_size=256)
    prompts = [[3 + i % 300 for i in range(n)] for n in (700, 30, 400, 300, 1000, 12)]
    with open_session(planned.plan, tmp_path) as session:
        session.loaded.tokenizer.eos_token_ids = set()
        result = batch(
            session.loaded, prompts, context_tokens=1500, settings=settings, batch_size=3
        )
        ledger = batch_ledger(session, result)
    bounds = {(t.name, t.phase): t for t in ledger.terms if t.basis == "bound"}
    assert ledger.measured["kv_cache", "decode"] > 0
    for key in (("kv_cache", "decode"), ("recurrent_state", "always")):
        if key in bounds:
            assert ledger.measured[key] <= bounds[key].size_bytes
    assert ledger.measured_peak_bytes is not None
    assert ledger.measured_peak_bytes <= ledger.predicted_peak_bytes


def test_thinking_is_told_from_the_answer(tmp_path: Path) -> None:
    loaded = load(saved_model("full", tmp_path))
    prompts = [loaded.tokenizer.encode(text) for text in ("Hi<think>", "Hi")]
    thought, said = batch(
        loaded, prompts, context_tokens=100, settings=Settings(max_tokens=5)
    ).answers
    assert (thought.text, thought.thinking != "") == ("", True)
    assert (said.text != "", said.thinking) == (True, "")
