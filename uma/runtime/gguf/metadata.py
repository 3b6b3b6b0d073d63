"""Typed access to the single values of a GGUF header's metadata.

Values come from a file that anyone may have written: each is checked for its type and range when
it is read.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from uma.errors import CheckpointError

MAX_INTEGER = 2**31 - 1
"""No count, size or token id of a model exceeds an int32."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """The key-value pairs of a GGUF header; ``None`` as default marks a key that must be there.

    Every method raises ``CheckpointError`` on a missing key or a value of another type.
    """

    values: Mapping[str, object]

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number from 0 to ``MAX_INTEGER``."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_INTEGER:
            raise self._wrong(key, value, f"a whole number from 0 to {MAX_INTEGER}")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number from 1 to ``MAX_INTEGER``."""
        value = self.integer(key, default)
        if not value:
            raise self._wrong(key, value, "at least 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number that is not negative."""
        value = self._value(key, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 <= value < math.inf
        ):
            raise self._wrong(key, value, "a finite number, not negative")
        return float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.number(key, default)
        if not value:
            raise self._wrong(key, value, "above 0")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        """A boolean."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def token_id(self, key: str, vocab_size: int) -> int | None:
        """The token id under ``key``, or ``None`` where it is absent or outside the vocabulary.

        llama.cpp b11434 ignores an id outside the vocabulary too (``llama-vocab.cpp``).
        """
        if key not in self.values:
            return None
        value = self.integer(key)
        return value if value < vocab_size else None

    def _value(self, key: str, default: object) -> object:
        value = self.values.get(key, default)
        if value is None:
            raise CheckpointError(f"this GGUF file has no key {key}; download it again")
        return value

    def _wrong(self, key: str, value: object, allowed: str) -> CheckpointError:
        return CheckpointError(f"GGUF key {key} is {str(value)[:40]!r}; it must be {allowed}")
