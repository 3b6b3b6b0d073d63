"""Tokens of a data set's rows from a tokenizer's files, without mlx-lm or transformers.

For estimates on machines that have neither: the ``tokenizers`` package reads ``tokenizer.json``,
and chat templates run in the sandbox that ``uma run`` gives them. Lengths are those that
``mlx_lm.lora`` gets (0.32.2, ``tuner/datasets.py``); a test compares the two.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from uma.dataset.rows import Row
from uma.errors import CheckpointError, RuntimeUnavailable, UnsupportedModel

ROWS_AT_ONCE = 512
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


class FileEncoder:
    """The tokenizer of a model's folder.

    Raises:
        RuntimeUnavailable: If a package is not installed.
        CheckpointError: If the folder has no tokenizer that can be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = _tokenizer(folder)
        self.config = _json(folder / "tokenizer_config.json")
        special = {name: _text(self.config.get(name)) for name in SPECIAL_TOKENS}
        self.special = {name: text for name, text in special.items() if text is not None}
        self.template = _template(folder, self.config)
        self.render: Any = None

    def lengths(
        self, rows: Sequence[Row], progress: Callable[[int, int], None] | None = None
    ) -> list[int | None]:
        """Tokens of each row; ``None`` for a chat that the template refuses."""
        found: list[int | None] = []
        for at in range(0, len(rows), ROWS_AT_ONCE):
            found += self._lengths(rows[at : at + ROWS_AT_ONCE])
            if progress is not None:
                progress(len(found), len(rows))
        return found

    def _lengths(self, rows: Sequence[Row]) -> list[int | None]:
        texts = [row.data["text"] if row.format == "text" else self._chat(row) for row in rows]
        encoded: dict[int, Any] = {}
        for plain in (True, False):  # a template writes special tokens itself
            chosen = [
                n
                for n, row in enumerate(rows)
                if (row.format == "text") is plain and texts[n] is not None
            ]
            batch = [texts[n] for n in chosen]
            found = self.tokenizer.encode_batch(batch, add_special_tokens=plain)
            encoded |= dict(zip(chosen, found, strict=True))
        return [
            self._counted(row, encoded[n].ids) if n in encoded else None
            for n, row in enumerate(rows)
        ]

    def _counted(self, row: Row, ids: Sequence[int]) -> int:
        """With the end that mlx-lm puts after plain text."""
        if row.format != "text":
            return len(ids)
        end = self.tokenizer.token_to_id(self.special.get("eos_token", ""))
        return len(ids) + (not ids or ids[-1] != end)

    def _chat(self, row: Row) -> str | None:
        if self.template is None:
            raise UnsupportedModel(
                f"the model in {self.folder} has no chat template, and line {row.line} is no plain "
                'text; give rows of {"text": "..."}'
            )
        if self.render is None:
            self.render = _renderer(self.folder, self.template)
        variables = {
            **self.special,
            "messages": _messages(row),
            "tools": row.data.get("tools"),
            "documents": None,
            "add_generation_prompt": False,
        }
        try:
            return str(self.render(variables))
        except Exception:  # the template's own: any kind
            return None


def _messages(row: Row) -> Any:
    if row.format != "completions":
        return row.data["messages"]
    return [
        {"role": "user", "content": row.data["prompt"]},
        {"role": "assistant", "content": row.data["completion"]},
    ]


def _tokenizer(folder: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise RuntimeUnavailable(
            "--data counts tokens with the tokenizers package, which is not installed: "
            "pip install tokenizers (mlx-lm and transformers bring it)"
        ) from None
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(
            f"{folder} has no tokenizer.json, with which --data counts tokens: download the "
            "model's tokenizer files, or name a folder that has them with --tokenizer"
        )
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the tokenizers library raises bare Exception
        raise CheckpointError(f"{file} cannot be read: {error}") from None


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} holds no object")
    return found


def _text(token: Any) -> str | None:
    """A special token, which stands there as text or as an object."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _template(folder: Path, config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):  # of several, that for chats
        named = {one["name"]: one["template"] for one in found}
        found = named.get("default") or next(iter(named.values()), None)
    return found if isinstance(found, str) else None


def _renderer(folder: Path, template: str) -> Any:
    try:
        from uma.runtime.template_worker import environment

        compiled = environment().from_string(template)
    except ImportError:
        raise RuntimeUnavailable(
            "--data renders chats with the jinja2 package, which is not installed: "
            "pip install jinja2 (mlx-lm and transformers bring it)"
        ) from None
    except Exception as error:  # of Jinja's parser
        raise CheckpointError(f"the chat template in {folder} cannot be read: {error}") from None
    return compiled.render
