"""The command that serves a planned model with other programs, within the limits found to fit."""

import shlex
from typing import TYPE_CHECKING, Literal

from uma.errors import UsageError
from uma.units import printable

if TYPE_CHECKING:
    from uma.checkpoint.source import ModelSource
    from uma.plan.inference import InferencePlan

Server = Literal["mlx_lm.server", "llama-server", "lms"]


def server_command(server: Server, source: "ModelSource", plan: "InferencePlan") -> str:
    """A shell command, preceded by comments that say why each value.

    Flags: mlx-lm 0.32.2 ``server.py``; llama.cpp b11434 ``common/arg.cpp``; ``lms load --help`` of
    LM Studio (lmstudio.ai/docs/cli/load).

    Raises:
        UsageError: If the server cannot load a model of this kind.
    """
    emit = {"mlx_lm.server": _mlx_lm, "llama-server": _llama_server, "lms": _lms}[server]
    comments, arguments = emit(source, plan)
    lines = (f"# {printable(line, kept='')}" for line in comments)
    return "\n".join([*lines, shlex.join(arguments)])


def _mlx_lm(source: "ModelSource", plan: "InferencePlan") -> tuple[list[str], list[str]]:
    if source.kind in ("gguf", "default"):
        raise UsageError(
            "mlx_lm.server does not load GGUF: `uma convert` the file first, or use llama-server"
        )
    workload = plan.workload
    caches = _cache_bytes(plan)
    arguments = ["mlx_lm.server", "--model", _place(source)]
    arguments += ["--prefill-step-size", str(workload.prefill_step_size)]
    arguments += ["--decode-concurrency", "1", "--prompt-concurrency", "1"]
    arguments += ["--prompt-cache-size", "1", "--prompt-cache-bytes", str(caches)]
    if workload.kv_bits is not None:
        arguments += ["--kv-bits", str(workload.kv_bits)]
        arguments += ["--kv-group-size", str(workload.kv_group_size)]
    comments = [
        f"planned for {workload.context_tokens:,} tokens, which mlx_lm.server does not enforce",
        f"one request at a time, and {caches:,} bytes of saved caches: one context",
    ]
    if plan.form.load_terms:
        comments.append(
            f"planned as {plan.form.name}: mlx_lm.server loads what is stored, so convert first"
        )
    return comments, arguments


def _llama_server(source: "ModelSource", plan: "InferencePlan") -> tuple[list[str], list[str]]:
    if source.kind in ("gguf", "default") and source.path is not None:
        arguments = ["llama-server", "-m", str(source.path)]
    elif source.resolution is not None and source.resolution.gguf_type is not None:
        arguments = ["llama-server", "-hf", f"{source.repo}:{source.resolution.gguf_type}"]
    else:
        raise UsageError(
            "llama-server loads GGUF: give a .gguf file, or a repository as REPO:Q4_K_M"
        )
    workload = plan.workload
    arguments += ["-c", str(workload.context_tokens), "-np", "1", "-ngl", "99"]
    if workload.kv_bits == 8:
        arguments += ["-fa", "on", "-ctk", "q8_0", "-ctv", "q8_0"]
    elif workload.kv_bits == 4:
        arguments += ["-fa", "on", "-ctk", "q4_0", "-ctv", "q4_0"]
    return [
        f"{workload.context_tokens:,} tokens for one sequence, all layers on the GPU"
    ], arguments


def _lms(source: "ModelSource", plan: "InferencePlan") -> tuple[list[str], list[str]]:
    if source.repo is None:
        raise UsageError("lms loads models that LM Studio has: give the name of a hub repository")
    arguments = ["lms", "load", source.repo, "--gpu", "max"]
    arguments += ["--context-length", str(plan.workload.context_tokens)]
    return ["LM Studio must have downloaded the model: lms get " + source.repo], arguments


def _place(source: "ModelSource") -> str:
    return str(source.path) if source.repo is None else source.repo


def _cache_bytes(plan: "InferencePlan") -> int:
    names = ("kv_cache", "recurrent_state")
    held = [t.size_bytes for t in plan.ledger.terms if t.name in names and t.phase != "prefill"]
    return sum(held)
