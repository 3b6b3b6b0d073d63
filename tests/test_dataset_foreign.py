"""What people bring that is no data set of mlx-lm: each is told how to become one."""

import gzip
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from test_dataset import CHAT, Letters, chat_row, checked, written

from uma.dataset.check import split_files
from uma.dataset.examples import example_of
from uma.dataset.rows import read_rows
from uma.errors import DataError

TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
SHAREGPT = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
FOREIGN: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (SHAREGPT, {"messages": TURNS}),
    ({"instruction": "i", "input": "", "output": "o"}, {"prompt": "i", "completion": "o"}),
    ({"instruction": "i", "input": "x", "output": "o"}, {"prompt": "i\n\nx", "completion": "o"}),
    ({"question": "q", "answer": "a"}, {"prompt": "q", "completion": "a"}),
    ({"prompt": "q", "chosen": "a", "rejected": "b"}, {"prompt": "q", "completion": "a"}),
    ({"chosen": TURNS, "rejected": TURNS[:1]}, {"messages": TURNS}),
]


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq")
@pytest.mark.parametrize(("row", "wanted"), FOREIGN)
def test_the_commonest_other_formats_come_with_a_line_that_converts_them(
    tmp_path: Path, row: dict[str, Any], wanted: dict[str, Any]
) -> None:
    path = written(tmp_path, row)
    (problem,) = read_rows(path).problems
    program = problem.text.split("jq -c '")[1].removesuffix("'")
    done = subprocess.run(["jq", "-c", program, str(path)], capture_output=True, check=True)
    assert json.loads(done.stdout) == wanted
    path.write_bytes(done.stdout)
    assert not read_rows(path).problems


def test_half_a_character_is_named_where_it_stands(tmp_path: Path) -> None:
    """The tokenizer would say "TextEncodeInput must be Union[...]"."""
    lines = [r'{"text": "a \uD83D b"}', r'{"text": "a \ud83d\ude00 b"}', r'{"text": "\\ud83d"}']
    (problem,) = read_rows(written(tmp_path, *lines)).problems
    assert (problem.line, problem.column) == (1, 13)
    assert problem.text == r"\ud83d is half of a character"


class Refusing(Letters):
    """As templates do that add up what is no text."""

    def text(self, text: str) -> list[int]:
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"messages": [TURNS[0], {"role": "assistant", "tool_calls": [{}]}]}, '"content": ""'),
        ({"messages": [{"role": "user", "content": [{"text": "q"}]}]}, "into one text"),
        ({"text": "a"}, "the tokenizer refuses it: no text"),
    ],
)
def test_what_a_row_is_refused_for_comes_with_a_remedy(
    tmp_path: Path, row: dict[str, Any], text: str
) -> None:
    from uma.dataset.check import check_split

    (problem,) = check_split(
        "train",
        written(tmp_path, row),
        Refusing(),
        mask_prompt=False,
        max_seq_length=64,
        overlong="drop",
    ).problems
    assert text in problem.text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("train.jsonl.gz", "gunzip -k {}/train.jsonl.gz"),
        ("train.json", "jq -c '.[]' {}/train.json > {}/train.jsonl"),
        ("train.jsonl/part", "{}/train.jsonl is a folder, a pipe or a dead link"),
    ],
)
def test_a_folder_that_nearly_has_a_training_file_is_told_what_is_missing(
    tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    with pytest.raises(DataError, match=re.escape(text.replace("{}", str(tmp_path)))):
        split_files(tmp_path)


def test_a_file_instead_of_its_folder_is_told_the_folder(tmp_path: Path) -> None:
    path = written(tmp_path, CHAT)
    with pytest.raises(DataError, match=re.escape(f"--data {tmp_path} ")):
        split_files(path)


def test_a_packed_file_is_told_to_be_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(gzip.compress(b'{"text": "a"}\n'))
    with pytest.raises(DataError, match="packed by gzip"):
        read_rows(path)


class Counting(Letters):
    calls = 0

    def chat(self, messages: Any, tools: Any, add_generation_prompt: bool) -> list[int]:
        self.calls += 1
        return super().chat(messages, tools, add_generation_prompt)


def test_a_chat_is_rendered_once_where_neither_masks_nor_counts_are_wanted() -> None:
    row, encoder = chat_row("hi", "yes", "oh", "no"), Counting()
    plain = example_of(row, encoder, mask_prompt=False, count_roles=False)
    assert encoder.calls == 1
    counted = example_of(row, Letters(), mask_prompt=False)
    assert (plain.tokens, plain.supervised) == (counted.tokens, counted.supervised)
    assert plain.roles.keys() == counted.roles.keys()
    masked = [example_of(row, Letters(), mask_prompt=True, count_roles=c) for c in (True, False)]
    assert masked[0] == masked[1]


def test_an_unusual_role_is_found_without_counts(tmp_path: Path) -> None:
    from uma.dataset.check import findings

    path = written(tmp_path, {"messages": [{"role": "asistant", "content": "yes"}]}, CHAT)
    split = checked(path, mask_prompt=False, count_roles=False)
    assert any("unusual roles: asistant" in line for line in findings({"train": split}, 1))
