"""Tokens as they come, turned into text: stop strings, thinking blocks, the reason for the end."""

from dataclasses import dataclass, field
from typing import Any

from uma.measurement.generation import FinishReason


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of text; ``thinking`` if it stood between the model's thinking marks."""

    text: str
    thinking: bool = False


@dataclass(slots=True)
class Answer:
    """One answer in the making. ``tokens`` are all generated ones, the end-of-sequence one too.

    ``limit`` is how many tokens may come, of which ``max_tokens`` were asked for (``None``: as
    many as the context takes).
    """

    tokenizer: Any
    prompt: list[int]
    limit: int
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    _detokenizer: Any = field(init=False)
    _state: Any = field(init=False)

    def __post_init__(self) -> None:
        self._detokenizer = self.tokenizer.detokenizer
        self._state = _matcher(self.tokenizer, self.prompt, self.stop)

    def add(self, token: int) -> list[Segment]:
        """Take a token; the text that is certain by now, what may be part of a mark held back."""
        self.tokens.append(token)
        segments = []
        if token in self.tokenizer.eos_token_ids:
            self.finish_reason = "stop"
        else:
            self._detokenizer.add_token(token)
            segments = self._match(self._detokenizer.last_segment)
        if self.finish_reason is None and len(self.tokens) == self.limit:
            self.finish_reason = "length" if self.limit == self.max_tokens else "context"
        return segments

    def rest(self) -> list[Segment]:
        """The text still held back when the tokens have ended."""
        from mlx_lm.generate import TextStateMachine

        if self._ended:
            return []
        self._detokenizer.finalize()
        segments = self._match(self._detokenizer.last_segment)
        if self._ended:
            return segments
        self._state, held, state = TextStateMachine.flush(self._state)
        return [*segments, Segment(held, state == "thinking")]

    @property
    def _ended(self) -> bool:
        return self._state[0] is None

    def _match(self, text: str) -> list[Segment]:
        from mlx_lm.generate import TextStateMachine

        self._state, parts = TextStateMachine.split(self._state, text)
        if self._ended:
            self.finish_reason = "stop"
        return [Segment(part, state == "thinking") for state, part in parts if part]


def _matcher(tokenizer: Any, prompt: list[int], stop: tuple[str, ...]) -> Any:
    """mlx-lm's matcher over streamed text: stop strings end it, thinking marks are taken out."""
    from mlx_lm.generate import TextStateMachine

    edges: dict[str, list[tuple[str, str | None]]] = {
        state: [(text, None) for text in stop] for state in ("answer", "thinking")
    }
    inside = False
    if tokenizer.has_thinking:
        edges["answer"].append((tokenizer.think_start, "thinking"))
        edges["thinking"].append((tokenizer.think_end, "answer"))
        tail = prompt[-16:]  # a template may open the block itself, at the very end of the prompt
        inside = tokenizer.rfind_think_start(tail) > tokenizer.rfind_think_end(tail)
    return TextStateMachine(edges).make_state("thinking" if inside else "answer")
