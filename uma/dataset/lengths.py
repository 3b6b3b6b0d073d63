"""The lengths of a data set's rows in tokens, and the batches that a trainer makes of them."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from uma.dataset.batches import batch_plan, padded_length
from uma.dataset.packing import packs
from uma.dataset.rows import Row, expected_schemas, read_rows
from uma.errors import DataError
from uma.frozen import dataclass

Batching = Literal["mlx_lm", "uma", "torch"]

MLX_LM_PAD = 32  # mlx-lm 0.32.2, tuner/trainer.py, iterate_batches: pad_to


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of each usable row and the line it stands on; ``problems`` are rows that are none."""

    tokens: tuple[int, ...]
    lines: tuple[int, ...]
    problems: int = 0

    @property
    def total(self) -> int:
        return sum(self.tokens)

    @property
    def longest(self) -> int:
        return max(self.tokens)

    @property
    def longest_line(self) -> int:
        return self.lines[self.tokens.index(self.longest)]

    def at(self, share: float) -> int:
        """The length that ``share`` of the rows do not pass.

        >>> Lengths((5, 1, 9, 3), (1, 2, 3, 4)).at(0.5)
        3
        """
        return sorted(self.tokens)[max(0, -int(-share * len(self.tokens) // 1) - 1)]

    def cut(self, max_seq_length: int) -> tuple[int, int]:
        """Rows that are longer, and the tokens that truncation takes from them."""
        lost = [n - max_seq_length for n in self.tokens if n > max_seq_length]
        return len(lost), sum(lost)


def lengths_of(path: Path, count: Callable[[Sequence[Row]], Sequence[int | None]]) -> Lengths:
    """The lengths of a file of JSON lines, or of the ``train.jsonl`` of a folder.

    ``count`` gives the tokens of each row, ``None`` for one that it refuses.

    Raises:
        DataError: If there is no file, or no row of it can be used.
    """
    if path.is_dir():
        from uma.dataset.check import split_files

        path = split_files(path)["train"]
    found = read_rows(path)
    counted = zip(found.rows, count(found.rows), strict=True)
    kept = [(n, row.line) for row, n in counted if n is not None]
    problems = len(found.problems) + len(found.rows) - len(kept)
    if not kept:
        first = found.located(found.problems[0]) if found.problems else ""
        reason = first or f"{path}: the chat template refuses all {problems} rows"
        raise DataError(f"{reason}; each line is one of:\n{expected_schemas()}")
    tokens, lines = zip(*kept, strict=True)
    return Lengths(tokens, lines, problems)


@dataclass(frozen=True, slots=True)
class Batches:
    """What one pass through the data is made of: batches, and the part of them that is padding.

    ``shapes`` are rows and tokens of those batches of which no other has as many of both.
    """

    count: int
    padding_share: float
    shapes: tuple[tuple[int, int], ...]


def batches_of(
    lengths: Sequence[int],
    batching: Batching,
    batch_size: int,
    max_seq_length: int,
    *,
    packed: bool = False,
) -> Batches:
    """The batches of rows of ``lengths``, cut to ``max_seq_length``.

    ``mlx_lm`` takes rows as they stand in the file (0.32.2, ``CacheDataset.itemlen``, by which it
    sorts, counts a row's keys), pads to 32 and one, and leaves out an incomplete batch. ``uma``
    puts rows of like length together. ``torch`` draws rows at random, so that the longest may be in
    a full batch; it pads to the longest row.

    Raises:
        DataError: If mlx_lm would have no batch.
    """
    rows = [min(n, max_seq_length) for n in lengths]
    if packed:
        rows = [sum(rows[n] for n in row) for row in packs(rows, max_seq_length)]
    made = list(_batches(rows, batching, batch_size))
    if not made:
        raise DataError(
            f"{len(rows)} rows are fewer than the batch of {batch_size}, which mlx_lm refuses: "
            f"give --batch-size {len(rows)}"
        )
    shapes = [(len(batch), _padded(max(batch), batching, max_seq_length)) for batch in made]
    positions = sum(count * length for count, length in shapes)
    share = 1 - sum(map(sum, made)) / positions
    if batching == "torch":
        shapes = [(min(batch_size, len(rows)), max(rows))]
    elif batching == "uma":  # its prediction pads by itself
        shapes = [(len(batch), max(batch)) for batch in made]
    return Batches(len(made), max(0.0, share), tuple(_largest(set(shapes))))


def _batches(rows: list[int], batching: Batching, batch_size: int) -> Iterator[list[int]]:
    if batching == "uma":
        for batch in batch_plan(rows, batch_size, seed=0, epoch=0):
            yield [rows[n] for n in batch]
        return
    last = len(rows) - batch_size + 1 if batching == "mlx_lm" else len(rows)
    for at in range(0, last, batch_size):
        yield rows[at : at + batch_size]


def _padded(tokens: int, batching: Batching, max_seq_length: int) -> int:
    if batching == "mlx_lm":
        return min(1 + -(-tokens // MLX_LM_PAD) * MLX_LM_PAD, max_seq_length)
    return max(tokens, padded_length(tokens)) if batching == "uma" else tokens


def _largest(shapes: set[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Those that no other shape contains."""
    for rows, tokens in sorted(shapes, reverse=True):
        if not any(r >= rows and t >= tokens and (r, t) != (rows, tokens) for r, t in shapes):
            yield rows, tokens
