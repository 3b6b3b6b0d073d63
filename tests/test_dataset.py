"""Rows, masks, lengths, batches and packs of a data set, partly against mlx-lm's own loader."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import save_tokenizer

from uma.dataset.batches import batch_plan, padded_length, padding_share
from uma.dataset.check import check_split, duplicates, findings, require_examples, split_files
from uma.dataset.examples import Example, example_of, fit
from uma.dataset.packing import packs
from uma.dataset.rows import Row, read_rows
from uma.errors import DataError

CHAT = {
    "messages": [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "Paris is the capital."},
        {"role": "user", "content": "The river?"},
        {"role": "assistant", "content": "The Seine."},
    ]
}


def written(folder: Path, *lines: Any, name: str = "train.jsonl") -> Path:
    path = folder / name
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return path


class Letters:
    """A tokenizer whose tokens are characters, with a template of tags around each message."""

    eos_token_id = ord("$")

    def text(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def chat(
        self, messages: Sequence[dict[str, Any]], tools: Any, add_generation_prompt: bool
    ) -> list[int]:
        parts = [f"<{m['role'][0]}>{m['content']}$" for m in messages]
        return self.text("".join(parts) + ("<a>" if add_generation_prompt else ""))


class Thinking(Letters):
    """As templates do that begin an answer with an empty thought, which the answer lacks."""

    def chat(
        self, messages: Sequence[dict[str, Any]], tools: Any, add_generation_prompt: bool
    ) -> list[int]:
        tokens = super().chat(messages, tools, add_generation_prompt)
        return tokens + self.text("[]") if add_generation_prompt else tokens


class Forgetful(Letters):
    """As templates do that leave out the thought of every answer but the last."""

    def chat(
        self, messages: Sequence[dict[str, Any]], tools: Any, add_generation_prompt: bool
    ) -> list[int]:
        last = len(messages) - 1
        kept = [
            m | {"content": m["content"] if n == last else m["content"].split("]")[-1]}
            for n, m in enumerate(messages)
        ]
        return super().chat(kept, tools, add_generation_prompt)


def shown(example: Example) -> str:
    """What is supervised, the rest as dots."""
    pairs = zip(example.tokens, example.supervised, strict=True)
    return "".join(chr(token) if yes else "." for token, yes in pairs)


def chat_row(*contents: str) -> Row:
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    return Row(1, "chat", {"messages": messages})


def test_the_four_formats_are_told_apart(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        CHAT,
        CHAT | {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"prompt": "a", "completion": "b"},
        {"text": "a"},
    )
    found = read_rows(path)
    assert [row.format for row in found.rows] == ["chat", "tools", "completions", "text"]
    assert not found.problems
    assert "mixed" in found.notes[0]


def test_a_byte_order_mark_and_blank_lines_are_passed_over_and_told(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n\n{"text": "b"}\n')
    found = read_rows(path)
    assert [row.line for row in found.rows] == [1, 4]
    assert found.notes == ("a byte-order mark passed over", "2 blank lines passed over")


@pytest.mark.parametrize(
    ("line", "column", "text"),
    [
        ("{", 2, "several lines"),
        ('{"text": "a",}', 14, "not JSON"),
        ('["a"]', 1, "list instead of an object"),
        ('{"txt": "a"}', 1, "no known format; its keys are 'txt'"),
        ('{"text": 3}', 2, "'text' is a number instead of text"),
        ('{"text": ""}', 2, "'text' is empty"),
        ('{"prompt": "a", "completion": null}', 17, "'completion' is null"),
        ('{"messages": []}', 2, "'messages' is an empty list"),
        ('{"messages": ["a"]}', 2, "messages[0] is text instead of an object"),
        ('{"messages": [{"content": "a"}]}', 2, "messages[0] has no 'role'"),
        ('{"messages": [{"role": "user"}]}', 2, "messages[0] has no 'content'"),
        ('{"messages": [{"role": "user", "content": 1}]}', 2, "messages[0].content is a number"),
        ("[" * 100_000, 1, "nested too deep"),
    ],
)
def test_a_bad_row_is_named_with_line_and_column(
    tmp_path: Path, line: str, column: int, text: str
) -> None:
    (problem,) = read_rows(written(tmp_path, {"text": "good"}, line)).problems
    assert (problem.line, problem.column) == (2, column)
    assert text in problem.text


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (b'[{"text": "a"}]', "JSON array"),
        (b'{"text": "a"}\n\xff', "train.jsonl:2: not UTF-8 (byte 0xff)"),
    ],
)
def test_a_file_that_is_no_json_lines_is_refused(tmp_path: Path, content: bytes, text: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=text.replace("(", r"\(").replace(")", r"\)")):
        read_rows(path)


def test_every_assistant_turn_is_supervised_with_its_end() -> None:
    example = example_of(chat_row("hi", "yes", "oh", "no"), Letters(), mask_prompt=True)
    assert shown(example) == "." * 9 + "yes$" + "." * 9 + "no$"


def test_a_generation_prompt_that_the_answer_lacks_shifts_nothing() -> None:
    example = example_of(chat_row("hi", "yes"), Thinking(), mask_prompt=True)
    assert shown(example) == "." * 9 + "yes$"


def test_a_turn_that_the_template_changes_later_is_counted_and_not_supervised() -> None:
    row = chat_row("hi", "[hm]yes", "oh", "[so]no")
    example = example_of(row, Forgetful(), mask_prompt=True)
    assert shown(example).endswith("<a>[so]no$".replace("<a>", "..."))
    assert "yes" not in shown(example)
    assert example.unsupervised_turns == 1


def test_text_ends_with_the_end_of_sequence_token_once() -> None:
    for text in ("ab", "ab$"):
        example = example_of(Row(1, "text", {"text": text}), Letters(), mask_prompt=False)
        assert shown(example) == "ab$"


def test_tokens_are_those_of_mlx_lm(tmp_path: Path) -> None:
    from mlx_lm.tuner.datasets import ChatDataset, CompletionsDataset, TextDataset
    from mlx_lm.utils import load_tokenizer

    from uma.runtime.lora.encoder import TokenizerEncoder

    save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    encoder = TokenizerEncoder(tokenizer)
    completion = {"prompt": "The river?", "completion": "The Seine."}
    for kind, data, theirs in (
        ("chat", CHAT, ChatDataset([CHAT], tokenizer)),
        ("completions", completion, CompletionsDataset([], tokenizer, *completion, False)),
        ("text", {"text": "Paris"}, TextDataset([], tokenizer)),
    ):
        example = example_of(Row(1, kind, data), encoder, mask_prompt=False)  # type: ignore[arg-type]
        assert list(example.tokens) == theirs.process(data)[0]
    # Of a chat of one turn mlx-lm masks the same; of longer ones it supervises the last alone.
    masked = CompletionsDataset([], tokenizer, *completion, True)
    tokens, offset = masked.process(completion)
    example = example_of(Row(1, "completions", completion), encoder, mask_prompt=True)
    assert example.supervised == tuple(n >= offset for n in range(len(tokens)))
    longer = example_of(Row(1, "chat", CHAT), encoder, mask_prompt=True)
    last = ChatDataset([CHAT], tokenizer, mask_prompt=True).process(CHAT)
    assert longer.targets > len(last[0]) - last[1]


def example(tokens: int, supervised_from: int = 0, line: int = 1) -> Example:
    return Example(
        line, tuple(range(tokens)), tuple(n >= supervised_from for n in range(tokens)), {}
    )


def test_truncation_counts_what_is_lost_and_the_ends() -> None:
    fitted = fit([example(10, line=1), example(5, line=2)], 6, "truncate")
    assert [len(e.tokens) for e in fitted.examples] == [6, 5]
    assert (fitted.overlong_lines, fitted.lost_tokens, fitted.lost_ends) == ((1,), 4, 1)


def test_splitting_keeps_every_target_once() -> None:
    whole = example(23, supervised_from=4)
    fitted = fit([whole], 6, "split")
    pieces = fitted.examples
    assert max(len(e.tokens) for e in pieces) == 6
    targets = [
        t for e in pieces for t, yes in zip(e.tokens[1:], e.supervised[1:], strict=True) if yes
    ]
    assert targets == list(range(4, 23))
    assert fitted.lost_ends == 0


def test_dropping_leaves_the_long_ones_out() -> None:
    fitted = fit([example(10, line=1), example(5, line=2)], 6, "drop")
    assert [e.line for e in fitted.examples] == [2]


def test_rows_with_nothing_to_predict_are_dropped_and_named() -> None:
    """One of them makes mlx-lm's loss not a number (0 supervised tokens)."""
    fitted = fit([example(9, supervised_from=7, line=3), example(4, line=4)], 6, "truncate")
    assert [e.line for e in fitted.examples] == [4]
    assert fitted.unsupervised_lines == (3,)


def test_batches_hold_every_example_once_and_like_lengths_together() -> None:
    lengths = [300, 5, 290, 6, 7, 310, 8, 295, 9]
    plan = batch_plan(lengths, 4, seed=1, epoch=0)
    assert sorted(n for batch in plan for n in batch) == list(range(9))
    assert {5, 6, 7, 8} in [{lengths[n] for n in batch} for batch in plan]
    assert plan == batch_plan(lengths, 4, seed=1, epoch=0)
    assert plan != batch_plan(lengths, 4, seed=1, epoch=1)


def test_bucketing_by_tokens_halves_the_padding_of_mlx_lm() -> None:
    """mlx-lm 0.32.2 sorts by the number of keys of a row: the order of the file."""
    lengths = [20, 900, 30, 1000, 25, 950, 28, 980]
    theirs = [[0, 1], [2, 3], [4, 5], [6, 7]]
    ours = batch_plan(lengths, 2, seed=0, epoch=0)
    assert padding_share(lengths, ours) < 0.1 < 0.4 < padding_share(lengths, theirs)


@given(st.integers(1, 100_000))
def test_padded_lengths_are_few_and_waste_at_most_a_fifth(tokens: int) -> None:
    length = padded_length(tokens)
    assert tokens <= length
    assert length <= max(1.25 * tokens, tokens + 31)
    assert length % 32 == 0


def test_there_are_four_padded_lengths_between_powers_of_two() -> None:
    assert len({padded_length(n) for n in range(1025, 2049)}) == 4


@given(st.lists(st.integers(1, 64), max_size=60))
def test_packs_hold_every_example_once_and_no_row_too_much(lengths: list[int]) -> None:
    rows = packs(lengths, 64)
    assert sorted(n for row in rows for n in row) == list(range(len(lengths)))
    sums = [sum(lengths[n] for n in row) for row in rows]
    assert all(total <= 64 for total in sums)
    # First fit never leaves two rows that would fit into one.
    assert sum(total <= 32 for total in sums) <= 1


def checked(path: Path, **options: Any) -> Any:
    defaults: dict[str, Any] = {
        "mask_prompt": True,
        "max_seq_length": 64,
        "overlong": "truncate",
    }
    return check_split(path.stem, path, Letters(), **defaults | options)


def test_the_check_says_what_training_would_lose(tmp_path: Path) -> None:
    train = written(tmp_path, CHAT, {"prompt": "p" * 80, "completion": "c"}, CHAT)
    valid = written(tmp_path, CHAT, name="valid.jsonl")
    splits = {"train": checked(train, max_seq_length=70), "valid": checked(valid)}
    lines = "\n".join(findings(splits, 4))
    assert "3 rows are too long (first: line 1)" in lines
    assert "1 rows have nothing to predict and are dropped: lines 2" in lines
    assert "1 rows are also trained on (line 1 is line 1 of train.jsonl)" in lines
    assert "1 rows, fewer than the batch of 4" in lines
    assert duplicates(splits["train"].examples, splits["valid"].examples) == [(1, 1)]
    assert splits["train"].roles["assistant"] > 0
    targets = splits["train"].role_targets
    assert targets["user"] == 0
    assert targets["assistant"] == sum(e.targets for e in splits["train"].examples)


def test_tokens_to_predict_are_counted_by_role() -> None:
    whole = example_of(chat_row("hi", "yes"), Letters(), mask_prompt=False)
    assert whole.role_targets == {"user": 5, "assistant": 7}
    masked = example_of(chat_row("hi", "yes"), Letters(), mask_prompt=True)
    assert masked.role_targets == {"user": 0, "assistant": 4}
    assert sum(masked.role_targets.values()) == masked.targets


def test_plain_text_has_no_prompt_to_mask(tmp_path: Path) -> None:
    """mlx_lm 0.32.2 stops: "Prompt masking not supported for text dataset"."""
    path = written(tmp_path, {"text": "abc"}, CHAT)
    assert any("1 rows of plain text have no prompt" in note for note in checked(path).notes)
    assert not checked(path, mask_prompt=False).notes[1:]


def test_a_role_that_no_template_has_is_noted(tmp_path: Path) -> None:
    typo = {"messages": [{"role": "asistant", "content": "yes"}]}
    lines = findings({"train": checked(written(tmp_path, typo, CHAT))}, 1)
    assert any("unusual roles: asistant" in line for line in lines)


def test_a_template_that_refuses_a_row_is_a_problem_of_its_line(tmp_path: Path) -> None:
    class Strict(Letters):
        def chat(self, messages: Any, tools: Any, add_generation_prompt: bool) -> list[int]:
            if messages[0]["role"] == "system":
                raise ValueError("no system message, please")
            return super().chat(messages, tools, add_generation_prompt)

    system = {"messages": [{"role": "system", "content": "s"}, *CHAT["messages"]]}
    path = written(tmp_path, CHAT, system)
    split = check_split(
        "train", path, Strict(), mask_prompt=True, max_seq_length=99, overlong="drop"
    )
    assert [(p.line, "no system message" in p.text) for p in split.problems] == [(2, True)]
    with pytest.raises(DataError, match=r"train.jsonl:2:1: the chat template refuses it"):
        require_examples(split)


def test_a_folder_without_a_training_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.json").touch()
    with pytest.raises(DataError, match=r"no train.jsonl \(it holds data.json\)"):
        split_files(tmp_path)
    with pytest.raises(DataError, match="is no folder"):
        split_files(tmp_path / "nowhere")
