"""What model files hold, and how they come here."""

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with what is done and the total: bytes, or layers."""

DEFAULT_MODEL = "SmolLM2-135M-Instruct"  # uma.checkpoint.default_model fetches it
DEFAULT_MODEL_ID = f"HuggingFaceTB/{DEFAULT_MODEL}"
