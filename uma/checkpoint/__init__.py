"""What model files hold, and how they come here."""

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with what is done and the total: bytes, or layers."""
