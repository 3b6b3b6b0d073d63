"""``uma estimate --train --data``: the lengths of a data set, and the worst batch of them."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from models import save_tokenizer
from test_plan_training import case_on

from uma.cli import main
from uma.dataset.lengths import Lengths, batches_of, lengths_of
from uma.dataset.rows import read_rows
from uma.errors import CheckpointError, DataError, RuntimeUnavailable, UnsupportedModel, UsageError
from uma.plan.training.data import with_worst_batch
from uma.runtime.file_encoder import FileEncoder

CHAT = {
    "messages": [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "Paris is the capital of France."},
    ]
}
ROWS: list[dict[str, Any]] = [
    *({"text": "the quick brown fox " * count} for count in (3, 40, 1, 25, 90, 7, 7, 60, 2, 12)),
    CHAT,
    {"prompt": "The river?", "completion": "The Seine."},
]


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model")
    save_tokenizer(found)
    return found


@pytest.mark.parametrize("begins", [False, True], ids=["plain", "with a first token"])
def test_lengths_are_those_of_mlx_lm(folder: Path, tmp_path: Path, begins: bool) -> None:
    """A tokenizer that begins each text with a token does not begin a chat with a second one."""
    pytest.importorskip("mlx_lm")
    from mlx_lm.tuner.datasets import ChatDataset, CompletionsDataset, TextDataset
    from mlx_lm.utils import load_tokenizer
    from tokenizers import Tokenizer, processors

    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    if begins:
        made = Tokenizer.from_file(str(folder / "tokenizer.json"))
        first = "<|endoftext|>"
        made.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, made.token_to_id(first))]
        )
        made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    datasets = {
        "text": TextDataset([], tokenizer),
        "messages": ChatDataset([], tokenizer),
        "prompt": CompletionsDataset([], tokenizer, "prompt", "completion", False),
    }
    theirs = [
        len(next(data for key, data in datasets.items() if key in row).process(row)[0])
        for row in ROWS
    ]
    rows = read_rows(written(tmp_path / "data.jsonl", ROWS)).rows
    assert FileEncoder(tmp_path).lengths(rows) == theirs


@pytest.mark.parametrize(("batch_size", "max_seq_length"), [(1, 4096), (3, 4096), (4, 100)])
def test_batches_are_those_that_mlx_lm_makes(
    folder: Path, tmp_path: Path, batch_size: int, max_seq_length: int
) -> None:
    pytest.importorskip("mlx_lm")
    from mlx_lm.tuner.datasets import CacheDataset, TextDataset
    from mlx_lm.tuner.trainer import iterate_batches
    from mlx_lm.utils import load_tokenizer

    rows = ROWS[:10]
    data = CacheDataset(TextDataset(rows, load_tokenizer(folder)))
    theirs = [
        (batch.shape, sum(length for _, length in where.tolist()))
        for batch, where in iterate_batches(data, batch_size, max_seq_length, seed=0)
    ]
    encoder = FileEncoder(folder)
    lengths = lengths_of(written(tmp_path / "data.jsonl", rows), encoder.lengths)
    found = batches_of(lengths.tokens, "mlx_lm", batch_size, max_seq_length)
    assert found.count == len(theirs)
    assert found.shapes == (max(shape for shape, _ in theirs),)
    positions = sum(rows * tokens for (rows, tokens), _ in theirs)
    assert found.padding_share == pytest.approx(1 - sum(n for _, n in theirs) / positions)


def test_our_trainer_puts_rows_of_like_length_together() -> None:
    lengths = (900, 10, 12, 890, 11, 13, 14)
    mlx_lm = batches_of(lengths, "mlx_lm", 2, 2048)
    ours = batches_of(lengths, "uma", 2, 2048)
    assert mlx_lm.shapes == ((2, 929),)
    assert ours.shapes == ((2, 890), (1, 900)) or ours.shapes == ((1, 900), (2, 890))
    assert ours.padding_share < mlx_lm.padding_share


def test_a_random_order_may_put_the_longest_row_in_a_full_batch() -> None:
    assert batches_of((5, 7, 900, 3), "torch", 3, 2048).shapes == ((3, 900),)
    assert batches_of((5, 900), "torch", 3, 2048).shapes == ((2, 900),)


def test_packed_rows_hold_every_token_and_none_is_too_long() -> None:
    lengths = (500, 30, 70, 1000, 24, 400, 3000)
    found = batches_of(lengths, "torch", 1, 1024, packed=True)
    ((rows, tokens),) = found.shapes
    assert (rows, tokens) == (1, 1024)
    assert found.count == 3  # 1,024 of the row that is cut, 1,000 + 24, 500 + 400 + 70 + 30


def test_what_truncation_takes_is_counted() -> None:
    lengths = Lengths((10, 2000, 3000), (1, 2, 3))
    assert lengths.cut(1500) == (2, 2000)
    assert (lengths.longest, lengths.longest_line, lengths.total) == (3000, 3, 5010)


def test_the_estimate_is_that_of_the_worst_batch() -> None:
    """Of two batches, one with more rows and one with longer ones, that which needs more."""
    lengths = Lengths((100, 120, 130, 140, 9000), (1, 2, 3, 4, 5))
    case = case_on("mac-studio-m2-ultra-192", "llama-3.2-1b", 4, max_seq_length=16_384)
    found, data = with_worst_batch(case, lengths)
    assert (data.rows, data.tokens) == (4, 161)  # mlx_lm leaves the incomplete batch out
    torch = case_on("rtx-4090", "llama-3.2-1b", max_seq_length=16_384)
    found, data = with_worst_batch(torch, lengths)
    assert (found.workload.batch_size, found.workload.max_seq_length) == (4, 9000)


def test_of_two_shapes_the_one_that_needs_more_is_estimated() -> None:
    """Our trainer's batches: four rows of 140 tokens, and one of 9,000."""
    lengths = Lengths((100, 120, 130, 140, 9000), (1, 2, 3, 4, 5))
    case = case_on("mac-studio-m2-ultra-192", "llama-3.2-1b", 4, max_seq_length=16_384)
    _, data = with_worst_batch(replace(case, trainer="uma"), lengths)
    assert data.batches.shapes == ((4, 140), (1, 9000))
    assert (data.rows, data.tokens) == (1, 9000)


def test_mlx_lm_does_not_pack() -> None:
    case = case_on("mac-studio-m2-ultra-192", "llama-3.2-1b", 4)
    with pytest.raises(UsageError, match="does not pack"):
        with_worst_batch(case, Lengths((5,) * 8, tuple(range(8))), packed=True)


def test_fewer_rows_than_a_batch_are_refused_as_mlx_lm_does() -> None:
    with pytest.raises(DataError, match="give --batch-size 2"):
        batches_of((5, 6), "mlx_lm", 4, 2048)


@pytest.fixture
def without_tokenizers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)


@pytest.mark.usefixtures("without_tokenizers")
def test_without_the_tokenizers_package_it_is_said_what_to_install(folder: Path) -> None:
    with pytest.raises(RuntimeUnavailable, match="pip install tokenizers"):
        FileEncoder(folder)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        FileEncoder(tmp_path)


def test_a_tokenizer_that_is_cut_off_is_an_error_of_the_file(folder: Path, tmp_path: Path) -> None:
    whole = (folder / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="cannot be read"):
        FileEncoder(tmp_path)


def test_chats_need_a_template(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    data = written(tmp_path / "data.jsonl", [CHAT])
    with pytest.raises(UnsupportedModel, match="no chat template"):
        lengths_of(data, FileEncoder(tmp_path).lengths)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b'[{"text": "a"}]', "JSON array"),
        (b'{"text": "a', "not JSON"),
        (b'{"txt": "a"}', "no known format"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_data_that_cannot_be_used_is_refused_with_its_place(
    content: bytes, reason: str, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "data.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=reason) as error:
        lengths_of(tmp_path / "data.jsonl", FileEncoder(folder).lengths)
    assert "data.jsonl" in str(error.value)


def test_a_row_with_half_of_a_character_is_counted_as_unusable(
    folder: Path, tmp_path: Path
) -> None:
    """JSON allows ``\\ud800`` alone; no tokenizer does."""
    data = written(tmp_path / "data.jsonl", [{"text": "whole"}, {"text": "ab\ud800"}])
    found = lengths_of(data, FileEncoder(folder).lengths)
    assert (found.problems, found.lines) == (1, (1,))


def test_a_row_that_is_cut_off_is_counted_and_the_others_are_used(
    folder: Path, tmp_path: Path
) -> None:
    whole = written(tmp_path / "data.jsonl", ROWS).read_bytes()
    (tmp_path / "data.jsonl").write_bytes(whole[:-9])
    found = lengths_of(tmp_path / "data.jsonl", FileEncoder(folder).lengths)
    assert (found.problems, len(found.tokens)) == (1, len(ROWS) - 1)


ESTIMATE = ["estimate", "llama-3.2-1b", "--train", "lora", "--machine", "rtx-4090"]


def test_the_command_takes_a_file_or_a_folder(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path / "train.jsonl", ROWS)
    found = []
    file = folder / "tokenizer.json"
    for data, tokenizer in ((tmp_path, folder), (tmp_path / "train.jsonl", file)):
        arguments = [*ESTIMATE, "--data", str(data), "--tokenizer", str(tokenizer), "--json"]
        assert main(arguments) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]
    data_json, workload = found[0]["data"], found[0]["workload"]
    assert data_json["rows"] == len(ROWS)
    assert workload["max_seq_length"] == data_json["worst_batch_tokens"]
    assert data_json["longest_tokens"] == data_json["worst_batch_tokens"]
    assert data_json["longest_line"] == 5


def test_a_model_without_files_asks_for_a_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = written(tmp_path / "data.jsonl", ROWS)
    assert main([*ESTIMATE, "--data", str(data)]) == 1
    assert "or --tokenizer with one that has tokenizer.json" in capsys.readouterr().err


def test_a_shorter_length_cuts_rows_and_says_what_is_lost(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """E3: mlx-lm's "consider pre-splitting" was read as a lack of memory."""
    data = written(tmp_path / "data.jsonl", ROWS)
    arguments = [*ESTIMATE, "--data", str(data), "--tokenizer", str(folder)]
    assert main([*arguments, "--max-seq-length", "100"]) == 0
    out = capsys.readouterr().out
    assert "4 rows are longer than 100 tokens and are cut" in out
    assert "that is no lack of memory" in out
