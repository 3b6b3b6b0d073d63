"""Rows of a training set: JSON lines in the formats of mlx-lm, each checked where it stands."""

import json
import re
from pathlib import Path
from typing import Any, Literal

from uma.dataset.foreign import conversion
from uma.errors import DataError
from uma.frozen import dataclass

Format = Literal["chat", "tools", "completions", "text"]

SCHEMAS: dict[Format, str] = {
    "chat": '{"messages": [{"role": "user", "content": "..."}, '
    '{"role": "assistant", "content": "..."}]}',
    "tools": '{"messages": [...], "tools": [{"type": "function", "function": {...}}]}',
    "completions": '{"prompt": "...", "completion": "..."}',
    "text": '{"text": "..."}',
}
"""What mlx-lm 0.32.2 reads (``tuner/datasets.py``), an object on each line."""


_HALF = re.compile(r"[\ud800-\udfff]")
"""A surrogate that has lost its other half: JSON can write it, and no tokenizer reads it."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a file, counted from 1, and what it holds."""

    line: int
    format: Format
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with a line; ``column`` counts characters from 1."""

    line: int
    column: int
    text: str


@dataclass(frozen=True, slots=True)
class Rows:
    """The good rows of a file and the problems of the others; what was passed over as notes."""

    path: Path
    rows: tuple[Row, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]

    def located(self, problem: Problem) -> str:
        return f"{self.path}:{problem.line}:{problem.column}: {problem.text}"


def expected_schemas() -> str:
    """The four formats, a line each."""
    return "\n".join(f"  {name:11} {schema}" for name, schema in SCHEMAS.items())


def read_rows(path: Path) -> Rows:
    """Every line of ``path``, good or not. A byte-order mark and blank lines are passed over.

    Raises:
        DataError: If the file is missing, empty, not UTF-8, or no JSON lines at all.
    """
    text, notes = _text(path)
    rows, problems, blank = [], [], 0
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            blank += number <= text.count("\n")
            continue
        found = _row(number, line)
        if isinstance(found, Problem):
            problems.append(found)
        else:
            rows.append(found)
    if blank:
        notes.append(f"{blank} blank line{'s' * (blank > 1)} passed over")
    if len(formats := {row.format for row in rows}) > 1:
        mixed = ", ".join(sorted(formats))
        notes.append(f"formats are mixed ({mixed}); mlx_lm would read all rows as the first")
    return Rows(path, tuple(rows), tuple(problems), tuple(notes))


def _text(path: Path) -> tuple[str, list[str]]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    notes = []
    if content.startswith(b"\xef\xbb\xbf"):
        content = content[3:]
        notes.append("a byte-order mark passed over")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        if content.startswith(b"\x1f\x8b"):
            raise DataError(
                f"{path} is packed by gzip: mv {path} {path}.gz; gunzip {path}.gz"
            ) from None
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}:{line}: not UTF-8 (byte {content[error.start]:#04x}); save the file as UTF-8"
        ) from None
    if not text.strip():
        raise DataError(f"{path} is empty; each line is one of:\n{expected_schemas()}")
    if text.lstrip().startswith("["):
        raise DataError(
            f"{path}:1:1: a JSON array; write each of its objects on a line of its own, "
            "such as with: jq -c '.[]'"
        )
    return text, notes


def _row(number: int, line: str) -> Row | Problem:
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        return Problem(number, error.colno, _not_json(line, error))
    except (RecursionError, ValueError):
        return Problem(number, 1, "JSON nested too deep, or a number too long")
    if "\\ud" in line.lower() and (half := _HALF.search(json.dumps(data, ensure_ascii=False))):
        escape = f"\\u{ord(half.group()):x}"
        return Problem(number, line.lower().find(escape) + 1, f"{escape} is half of a character")
    if not isinstance(data, dict):
        return Problem(number, 1, f"{type(data).__name__} instead of an object")
    return _checked(number, data, line)


def _not_json(line: str, error: json.JSONDecodeError) -> str:
    if line.strip() in ("{", "}", "},", "]", "],") or line.strip().endswith((": {", ": [")):
        return "JSON over several lines; a row is one line"
    return f"not JSON: {error.msg[0].lower()}{error.msg[1:]}"


def _checked(number: int, data: dict[str, Any], line: str) -> Row | Problem:
    """The row with its format, decided as mlx-lm decides it, or what is wrong with it and where."""
    if "prompt" in data and "completion" in data:
        kind: Format = "completions"
        wrong = {key: _not_text(data, key) for key in ("prompt", "completion")}
    elif "messages" in data:
        kind = "tools" if data.get("tools") else "chat"
        wrong = {"messages": _wrong_messages(data["messages"])}
    elif "text" in data:
        kind = "text"
        wrong = {"text": _not_text(data, "text")}
    else:
        keys = ", ".join(map(repr, data)) or "none"
        return Problem(number, 1, f"no known format; its keys are {keys}{conversion(data)}")
    for key, text in wrong.items():
        if text is not None:
            return Problem(number, max(0, line.find(f'"{key}"')) + 1, text)
    return Row(number, kind, data)


def _not_text(data: dict[str, Any], key: str) -> str | None:
    value = data[key]
    if not isinstance(value, str):
        return f"{key!r} is {_kind(value)} instead of text"
    return None if value else f"{key!r} is empty"


def _wrong_messages(messages: Any) -> str | None:
    if not isinstance(messages, list) or not messages:
        return f"'messages' is {_kind(messages)} instead of a list of messages"
    for n, message in enumerate(messages):
        at = f"messages[{n}]"
        if not isinstance(message, dict):
            return f"{at} is {_kind(message)} instead of an object"
        if not isinstance(message.get("role"), str):
            return f"{at} has no 'role'"
        content = message.get("content")
        if content is None and not message.get("tool_calls"):
            return f"{at} has no 'content'"
        if not isinstance(content, str | list | None):
            return f"{at}.content is {_kind(content)} instead of text"
    return None


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
    if value is None:
        return "null"
    if value == []:
        return "an empty list"
    return names.get(type(value), "a number")
