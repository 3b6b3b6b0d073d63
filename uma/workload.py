"""What is asked of a model: how much text, how many sequences, in which precision of cache."""

from dataclasses import dataclass
from typing import Literal

DEFAULT_PREFILL_STEP_SIZE = 2048  # mlx-lm 0.32.2, generate.py, DEFAULT_PREFILL_STEP_SIZE
DEFAULT_KV_GROUP_SIZE = 64  # mlx-lm 0.32.2, generate.py, --kv-group-size

Backend = Literal["metal", "cpu"]
Engine = Literal["mlx", "llama.cpp", "transformers", "vllm"]


@dataclass(frozen=True, slots=True)
class Inference:
    """One generation: a prompt, then tokens one by one, within ``context_tokens``.

    ``prompt_tokens`` defaults to the whole context: the prompt that needs most memory.
    ``kv_bits`` of ``None`` keeps the cache in the model's activation dtype.
    """

    context_tokens: int = 8192
    prompt_tokens: int | None = None
    batch_size: int = 1
    prefill_step_size: int = DEFAULT_PREFILL_STEP_SIZE
    kv_bits: int | None = None
    kv_group_size: int = DEFAULT_KV_GROUP_SIZE

    @property
    def longest_prompt_tokens(self) -> int:
        return self.context_tokens if self.prompt_tokens is None else self.prompt_tokens
