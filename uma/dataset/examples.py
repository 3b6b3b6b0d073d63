"""Rows as tokens, each supervised or not."""

import hashlib
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, Literal, Protocol

from uma.dataset.rows import Row
from uma.frozen import dataclass

Overlong = Literal["truncate", "split", "drop"]
Message = dict[str, Any]


class Encoder(Protocol):
    """A tokenizer as data needs it. ``chat`` raises any error its template raises."""

    eos_token_id: int

    def text(self, text: str) -> list[int]: ...

    def chat(
        self, messages: Sequence[Message], tools: Any, add_generation_prompt: bool
    ) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Example:
    """The tokens of a row or of a part of it, and which of them are to be predicted.

    ``roles`` counts tokens by role, and ``role_targets`` those that are predicted;
    ``unsupervised_turns`` are assistant turns that the template renders otherwise inside a longer
    chat, so that they cannot be told apart.
    """

    line: int
    tokens: tuple[int, ...]
    supervised: tuple[bool, ...]
    roles: dict[str, int]
    unsupervised_turns: int = 0
    role_targets: Mapping[str, int] = field(default_factory=dict)

    @property
    def targets(self) -> int:
        """Tokens that are predicted: the first has nothing before it."""
        return sum(self.supervised[1:])


def fingerprint(examples: Sequence[Example]) -> str:
    """A hash of the tokens of ``examples``, in their order, and of which are supervised."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(array("q", (len(example.tokens), *example.tokens)).tobytes())
        digest.update(bytes(example.supervised))
    return digest.hexdigest()[:16]


def example_of(
    row: Row, encoder: Encoder, *, mask_prompt: bool, count_roles: bool = True
) -> Example:
    """The tokens of ``row``: all supervised, or with ``mask_prompt`` those of assistants alone.

    Plain text is supervised whole, and ends with the end-of-sequence token. To count the tokens of
    a role takes the beginnings of a chat, as a mask does; where neither is wanted, roles count 0.
    """
    if row.format == "text":
        tokens = encoder.text(row.data["text"])
        if not tokens or tokens[-1] != encoder.eos_token_id:
            tokens = [*tokens, encoder.eos_token_id]
        roles = {"text": len(tokens)}
        return Example(
            row.line,
            tuple(tokens),
            (True,) * len(tokens),
            roles,
            role_targets={"text": len(tokens) - 1},
        )
    if row.format == "completions":
        messages = [
            {"role": "user", "content": row.data["prompt"]},
            {"role": "assistant", "content": row.data["completion"]},
        ]
    else:
        messages = row.data["messages"]
    if not (mask_prompt or count_roles):
        tokens = encoder.chat(messages, row.data.get("tools"), False)
        roles = dict.fromkeys([message["role"] for message in messages], 0)
        return Example(row.line, tuple(tokens), (True,) * len(tokens), roles)
    return _chat_example(row, messages, encoder, mask_prompt)


def _chat_example(
    row: Row, messages: Sequence[Message], encoder: Encoder, mask_prompt: bool
) -> Example:
    tools = row.data.get("tools")
    tokens = encoder.chat(messages, tools, False)
    supervised = [not mask_prompt] * len(tokens)
    roles: Counter[str] = Counter()
    targets: Counter[str] = Counter()
    lost = done = 0
    for n, message in enumerate(messages):
        role = message["role"]
        end = _end(tokens, encoder, messages[: n + 1], tools, whole=n + 1 == len(messages))
        if end is None:
            lost += role == "assistant"
            continue
        roles[role] += end - done
        if role == "assistant" and mask_prompt:
            start = _answer_start(tokens, encoder, messages[:n], tools, done)
            supervised[start:end] = [True] * (end - start)
        targets[role] += sum(supervised[max(1, done) : end])
        done = end
    lost = lost if mask_prompt else 0
    return Example(row.line, tuple(tokens), tuple(supervised), dict(roles), lost, {**targets})


def _end(
    tokens: list[int], encoder: Encoder, messages: Sequence[Message], tools: Any, whole: bool
) -> int | None:
    """Where these first messages end in the whole chat, if the template renders them the same."""
    if whole:
        return len(tokens)
    try:
        part = encoder.chat(messages, tools, False)
    except Exception:  # a template may refuse the beginning of a chat it takes as a whole
        return None
    return len(part) if tokens[: len(part)] == part else None


def _answer_start(
    tokens: list[int], encoder: Encoder, before: Sequence[Message], tools: Any, done: int
) -> int:
    """Where the assistant's own words begin: after what the generation prompt and the chat share.

    They may part early: a generation prompt may hold an empty thought that the answer lacks.
    """
    try:
        prompt = encoder.chat(before, tools, True)
    except Exception:
        return done
    return max(done, shared_prefix(tokens, prompt))


def shared_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences begin with in common."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@dataclass(frozen=True, slots=True)
class Fitted:
    """Examples of at most the longest length, and what became of the others."""

    examples: tuple[Example, ...]
    overlong_lines: tuple[int, ...]
    lost_tokens: int
    lost_ends: int
    unsupervised_lines: tuple[int, ...]


def fit(examples: Sequence[Example], max_seq_length: int, overlong: Overlong) -> Fitted:
    """Cut, split or drop what is longer, then drop and name what has nothing to predict.

    ``lost_ends`` counts rows whose last token was cut off: they teach a model not to stop.
    """
    kept: list[Example] = []
    long = [e for e in examples if len(e.tokens) > max_seq_length]
    for example in examples:
        if len(example.tokens) <= max_seq_length:
            kept.append(example)
        elif overlong != "drop":
            kept.extend(_pieces(example, max_seq_length)[: 1 if overlong == "truncate" else None])
    before = sum(len(e.tokens) for e in examples)
    return Fitted(
        tuple(e for e in kept if e.targets),
        tuple(e.line for e in long),
        max(0, before - sum(len(e.tokens) for e in kept)),
        len(long) if overlong == "truncate" else 0,
        tuple(e.line for e in kept if not e.targets),
    )


def _pieces(example: Example, length: int) -> list[Example]:
    """Consecutive pieces; each repeats the last token before it, so that no target is lost."""
    starts = range(0, len(example.tokens) - 1, length - 1)
    return [
        Example(
            example.line,
            example.tokens[start : start + length],
            example.supervised[start : start + length],
            example.roles if not start else {},
        )
        for start in starts
    ]
