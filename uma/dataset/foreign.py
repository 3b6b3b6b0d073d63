"""Formats of data sets that mlx-lm does not read, and how to make one of them that it reads."""

from typing import Any

_CONVERSIONS = {
    ("conversations",): '{messages: [.conversations[] | {role: ({human: "user", gpt: '
    '"assistant"}[.from] // .from), content: .value}]}',
    ("instruction", "output"): "{prompt: ([.instruction, .input] | map(select(. != null and . != "
    '"")) | join("\\n\\n")), completion: .output}',
    ("question", "answer"): "{prompt: .question, completion: .answer}",
    ("prompt", "response"): "{prompt: .prompt, completion: .response}",
    ("prompt", "chosen"): "{prompt: .prompt, completion: .chosen}",
    ("chosen",): "{messages: .chosen}",
}
"""By the keys of a row: ShareGPT, Alpaca, questions, and pairs of preferred answers."""


def conversion(data: dict[str, Any]) -> str:
    """How to make rows like ``data`` readable, or nothing where that is not known."""
    for keys, program in _CONVERSIONS.items():
        if all(key in data for key in keys):
            return f"; make it one: jq -c '{program}'"
    return ""
