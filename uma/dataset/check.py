"""What a data set holds and what training on it would lose: the content of ``uma lora check``."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from uma.dataset.batches import batch_plan, padding_share
from uma.dataset.examples import Encoder, Example, Fitted, Overlong, example_of, fit
from uma.dataset.rows import Problem, Row, read_rows
from uma.errors import DataError
from uma.frozen import dataclass

SPLITS = ("train", "valid", "test")
ROLES = {"system", "developer", "user", "assistant", "tool", "function", "ipython", "text"}
"""Of published chat templates, and of plain text."""


@dataclass(frozen=True, slots=True)
class Split:
    """One file: its rows, what is wrong, and its examples as training would take them."""

    name: str
    path: Path
    formats: dict[str, int]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    examples: tuple[Example, ...]
    fitted: Fitted

    @property
    def usable(self) -> bool:
        """Whether every row can be read, and at least one has something to predict."""
        return not self.problems and bool(self.fitted.examples)

    @property
    def tokens(self) -> int:
        return sum(len(e.tokens) for e in self.examples)

    @property
    def supervised_tokens(self) -> int:
        return sum(e.targets for e in self.fitted.examples)

    @property
    def roles(self) -> dict[str, int]:
        """Tokens by role, before anything is cut."""
        return _summed(example.roles for example in self.examples)

    @property
    def role_targets(self) -> dict[str, int]:
        """Of them those to predict."""
        return _summed(example.role_targets for example in self.examples)

    def padding(self, batch_size: int) -> float:
        """Share of padding in batches of like length."""
        lengths = [len(e.tokens) for e in self.fitted.examples]
        return padding_share(lengths, batch_plan(lengths, batch_size, seed=0, epoch=0))


def _summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(total)


def split_files(folder: Path, needed: Sequence[str] = ("train",)) -> dict[str, Path]:
    """``train.jsonl``, ``valid.jsonl`` and ``test.jsonl`` of a folder, those that exist.

    Raises:
        DataError: If the folder or one of the ``needed`` files is missing.
    """
    if not folder.is_dir():
        which = f"its folder: --data {folder.parent}" if folder.is_file() else "a folder"
        raise DataError(f"{folder} is no folder; give {which} that holds {needed[0]}.jsonl")
    files = {name: folder / f"{name}.jsonl" for name in SPLITS}
    for name in needed:
        if not files[name].is_file():
            raise DataError(_missing(files[name]))
    return {name: path for name, path in files.items() if path.is_file()}


def _missing(file: Path) -> str:
    """Why there is no such file, and what of the folder would make it."""
    folder, name = file.parent, file.name
    if os.path.lexists(file):
        return f"{file} is a folder, a pipe or a dead link; a file of rows is needed"
    if (folder / f"{name}.gz").is_file():
        return f"{folder} has no {name}; unpack what it has: gunzip -k {file}.gz"
    if (array := file.with_suffix(".json")).is_file():
        return f"{folder} has no {name}; write a row a line: jq -c '.[]' {array} > {file}"
    found = ", ".join(sorted(p.name for p in folder.iterdir())[:5]) or "nothing"
    return f"{folder} has no {name} (it holds {found})"


def check_split(
    name: str,
    path: Path,
    encoder: Encoder,
    *,
    mask_prompt: bool,
    max_seq_length: int,
    overlong: Overlong,
    count_roles: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Split:
    """Read, tokenize and fit one file. Rows that cannot be used are its ``problems``.

    Raises:
        DataError: If the file holds no rows at all.
    """
    found = read_rows(path)
    examples: list[Example] = []
    problems = list(found.problems)
    for n, row in enumerate(found.rows, start=1):
        try:
            examples.append(
                example_of(row, encoder, mask_prompt=mask_prompt, count_roles=count_roles)
            )
        except Exception as error:  # the template's own: any kind
            problems.append(_refused(row, error))
        if progress is not None:
            progress(n, len(found.rows))
    formats = dict(Counter[str](row.format for row in found.rows))
    notes = found.notes
    if mask_prompt and formats.get("text"):
        notes += (f"{formats['text']} rows of plain text have no prompt and are predicted whole",)
    return Split(
        name,
        path,
        formats,
        tuple(sorted(problems, key=lambda p: p.line)),
        notes,
        tuple(examples),
        fit(examples, max_seq_length, overlong),
    )


def _refused(row: Row, error: Exception) -> Problem:
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    if row.format == "text":
        return Problem(row.line, 1, f"the tokenizer refuses it: {reason}")
    contents = [message.get("content") for message in row.data.get("messages", ())]
    if None in contents:
        reason += '; a message without words may need "content": ""'
    elif any(isinstance(content, list) for content in contents):
        reason += "; its template may take text alone: join the parts of a content into one text"
    return Problem(row.line, 1, f"the chat template refuses it: {reason}")


def duplicates(train: Sequence[Example], other: Sequence[Example]) -> list[tuple[int, int]]:
    """Lines of ``other`` whose tokens are also in ``train``, with the line there."""
    lines = {e.tokens: e.line for e in reversed(train)}
    return [(e.line, lines[e.tokens]) for e in other if e.tokens in lines]


def findings(splits: dict[str, Split], batch_size: int) -> list[str]:
    """What a reader should know before training, a sentence each."""
    lines: list[str] = []
    for split in splits.values():
        lines += [f"{split.path.name}: {note}" for note in split.notes]
        lines += _losses(split)
    train = splits["train"]
    for split in splits.values():
        if split is train:
            continue
        if same := duplicates(train.examples, split.examples):
            first = f"line {same[0][0]} is line {same[0][1]} of train.jsonl"
            lines.append(f"{split.path.name}: {len(same)} rows are also trained on ({first})")
        if 0 < len(split.fitted.examples) < batch_size:
            lines.append(
                f"{split.path.name}: {len(split.fitted.examples)} rows, fewer than the batch of "
                f"{batch_size}: evaluated in one smaller batch (mlx_lm stops)"
            )
    if "valid" not in splits:
        lines.append("no valid.jsonl: nothing will tell when the model begins to learn by heart")
    return lines


def _losses(split: Split) -> list[str]:
    lines, fitted, name = [], split.fitted, split.path.name
    if fitted.overlong_lines:
        share = fitted.lost_tokens / split.tokens
        lines.append(
            f"{name}: {len(fitted.overlong_lines)} rows are too long (first: line "
            f"{fitted.overlong_lines[0]}); {fitted.lost_tokens:,} tokens lost ({share:.1%})"
            + (f", and the end of {fitted.lost_ends} rows" if fitted.lost_ends else "")
        )
    if fitted.unsupervised_lines:
        shown = ", ".join(map(str, fitted.unsupervised_lines[:10]))
        more = " ..." if len(fitted.unsupervised_lines) > 10 else ""
        lines.append(
            f"{name}: {len(fitted.unsupervised_lines)} rows have nothing to predict and are "
            f"dropped: lines {shown}{more}"
        )
    if unknown := sorted(split.roles.keys() - ROLES):
        lines.append(f"{name}: unusual roles: {', '.join(unknown)}; are they spelled right?")
    if not fitted.examples:
        lines.append(f"{name}: nothing is left to predict")
    if lost := sum(e.unsupervised_turns for e in split.examples):
        lines.append(
            f"{name}: {lost} assistant turns are rendered otherwise inside a longer chat, and "
            "are not supervised"
        )
    return lines


def require_examples(split: Split) -> tuple[Example, ...]:
    """The examples of a file without problems, at least one.

    Raises:
        DataError: With the first problem and the expected formats.
    """
    from uma.dataset.rows import expected_schemas

    if split.problems:
        first, count = split.problems[0], len(split.problems)
        more = f" (and {count - 1:,} more; uma lora check --json lists all)" if count > 1 else ""
        raise DataError(
            f"{split.path}:{first.line}:{first.column}: {first.text}{more}; "
            f"each line is one of:\n{expected_schemas()}"
        )
    if not split.fitted.examples:
        raise DataError(f"{split.path} has no row with anything to predict")
    return split.fitted.examples
