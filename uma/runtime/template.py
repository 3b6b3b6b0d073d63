"""A chat as the model's tokens: its chat template, run in a process with bounds on all it takes."""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from uma.errors import CheckpointError
from uma.runtime import template_worker

SECONDS = 2.0
"""What a template may take; real ones take a few milliseconds."""

START_SECONDS = 60.0
"""What the process may take before that: to start, and to import Jinja from a cold disk."""

REASON = 300
"""Characters of a template's own error that are shown."""

Message = dict[str, Any]


def chat_tokens(
    tokenizer: Any,
    messages: list[Message],
    *,
    thinking: bool | None = None,
    template_config: dict[str, Any] | None = None,
) -> list[int]:
    """Token ids of a chat up to where the answer begins.

    ``thinking`` turns the model's thinking on or off where its template knows the switch; ``None``
    leaves it on. ``template_config`` holds further variables of the template. Without a template
    the messages follow each other as plain text.

    Raises:
        CheckpointError: If the template fails, or takes too long or too much memory.
    """
    variables = dict(template_config or {})
    variables.setdefault(
        "enable_thinking", tokenizer.has_thinking if thinking is None else thinking
    )
    if not tokenizer.has_chat_template:
        return list(tokenizer.encode("\n\n".join(m["content"] for m in messages)))
    if not isinstance(source := tokenizer.chat_template, str | dict):
        # mlx-lm and some tokenizers render in their own code, which is no part of the checkpoint.
        return list(
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, **variables)
        )
    if isinstance(source, dict):
        source = source.get("default") or next(iter(source.values()))
    text = render(
        source,
        tokenizer.special_tokens_map
        | {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
        | variables,
    )
    return list(tokenizer.encode(text, add_special_tokens=False))


def render(template: str, variables: dict[str, Any]) -> str:
    """The text of a Jinja ``template``, within ``SECONDS`` and the worker's memory.

    Raises:
        CheckpointError: If it fails or passes a bound; nothing of it keeps running.
    """
    import subprocess

    with tempfile.TemporaryFile("w+", encoding="utf-8") as request, tempfile.TemporaryFile() as out:
        json.dump({"template": template, "variables": variables}, request)
        request.seek(0)
        # -I and -S: neither the environment nor site hooks choose what is imported there.
        paths = [path for path in sys.path if path and Path(path).is_dir()]
        worker = subprocess.Popen(
            [sys.executable, "-I", "-S", template_worker.__file__, *paths],
            stdin=request,
            stdout=out,
            stderr=subprocess.DEVNULL,
        )
        try:
            _watch(worker, out)
        finally:
            worker.kill()
            worker.wait()
        out.seek(0)
        answer = out.read()
    try:
        parsed = json.loads(answer)
    except ValueError:
        raise CheckpointError("the model's chat template was stopped: too much memory") from None
    if "error" in parsed:
        reason = " ".join(str(parsed["error"]).split())[:REASON]
        raise CheckpointError(f"the model's chat template failed: {reason}")
    # A lone surrogate, which no tokenizer takes, becomes "?".
    return str(parsed["text"]).encode("utf-8", "replace").decode()


def _watch(worker: Any, out: Any) -> None:
    """Wait for the worker within its bounds; its clock starts with the first byte of ``out``."""
    import psutil

    deadline, ready = time.monotonic() + START_SECONDS, False
    process = psutil.Process(worker.pid)
    while worker.poll() is None:
        if not ready and os.fstat(out.fileno()).st_size:
            deadline, ready = time.monotonic() + SECONDS, True
        if time.monotonic() > deadline:
            what = f"ran longer than {SECONDS:g} s" if ready else "could not be started"
            raise CheckpointError(f"the model's chat template {what} and was stopped")
        try:
            if process.memory_info().rss > template_worker.MEMORY_BYTES:
                raise CheckpointError("the model's chat template was stopped: too much memory")
        except psutil.Error:
            pass  # it has just ended
        time.sleep(0.002)
