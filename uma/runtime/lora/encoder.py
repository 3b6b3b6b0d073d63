"""A tokenizer in mlx-lm's wrapper, as data sets need it."""

from collections.abc import Sequence
from typing import Any

from uma.dataset.examples import Message
from uma.errors import UnsupportedModel


class TokenizerEncoder:
    """Tokens of texts and chats as ``mlx_lm.lora`` makes them (0.32.2, ``tuner/datasets.py``)."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.eos_token_id = int(tokenizer.eos_token_id)

    def text(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text))

    def chat(
        self, messages: Sequence[Message], tools: Any, add_generation_prompt: bool
    ) -> list[int]:
        if not self.tokenizer.has_chat_template:
            raise UnsupportedModel("the model has no chat template; give rows of text")
        tokens = self.tokenizer.apply_chat_template(
            list(messages),
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            return_dict=False,
        )
        return list(tokens)
