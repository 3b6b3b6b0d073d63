"""Predictions held against measurements on tiny random models, one of each kind of cache.

Each is written as a folder and then planned, loaded and run as any other model.
"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from uma.architecture import architecture_from_config
from uma.catalog import DATA
from uma.checkpoint.source import locate
from uma.machine import Machine
from uma.measurement.checks import Check
from uma.measurement.decode import decode_read_bytes
from uma.measurement.trial import GENERATION_TOKENS, PROMPT_TOKENS, Trial
from uma.plan.forms import forms_of
from uma.plan.inference import Request, plan_inference, with_tokens
from uma.runtime.backend import backend
from uma.runtime.generate import Settings
from uma.runtime.measure import PhaseMeter, overhead_bytes
from uma.runtime.session import Measured, Session, answer, measured_ledger, open_session
from uma.runtime.template import chat_tokens
from uma.runtime.trace_model import lazy_model

PRODUCT_ERROR = 1e-2  # of the largest element; TF32, which MLX uses on an M5, is off by 1e-3


def tiny_models() -> dict[str, dict[str, Any]]:
    """The configurations that are shipped, by kind of cache."""
    models: dict[str, dict[str, Any]] = json.loads(
        (DATA / "doctor_models.json").read_text(encoding="utf-8")
    )
    del models["_source"]
    return models


def try_kind(kind: str, config: dict[str, Any], machine: Machine, folder: Path) -> Trial:
    """Write the model of ``config`` into ``folder``, plan it, run it, measure it.

    Its numbers are float32 on a processor, where MLX runs all kinds only so, else bfloat16.
    """
    dtype = "bfloat16" if machine.backend == "metal" else "float32"
    write_model(config | {"torch_dtype": dtype}, dtype, folder)
    source = locate(str(folder))
    assert source.config is not None
    architecture = architecture_from_config(source.config)
    request = Request(PROMPT_TOKENS + GENERATION_TOKENS, PROMPT_TOKENS)
    forms = forms_of(source, architecture, backend=machine.backend)
    plan = plan_inference(architecture, forms, request, machine)
    with open_session(plan, folder) as session:
        return try_session(kind, session)


def try_session(model: str, session: Session) -> Trial:
    """Answer a random prompt; what was predicted of it and measured."""
    mx.random.seed(0)
    vocabulary = session.plan.architecture.vocab_size
    prompt: Any = mx.random.randint(0, vocabulary, (PROMPT_TOKENS,)).tolist()
    measured = Measured(PhaseMeter())
    for _ in answer(session, prompt, Settings(max_tokens=GENERATION_TOKENS), measured):
        pass
    assert measured.stats is not None  # nothing but Ctrl-C ends an answer without
    plan, stats = session.plan, measured.stats
    asked = with_tokens(plan, stats.prompt_tokens, stats.prompt_tokens + stats.generation_tokens)
    return Trial(
        model=model,
        form=plan.form.name,
        ledger=measured_ledger(session, measured),
        active_peak_bytes=asked.active_peak_bytes,
        peaks=dict(measured.meter.peaks),
        generation_tps=stats.generation_tps,
        overhead_bytes=overhead_bytes(),
        read_bytes=decode_read_bytes(plan, stats.cache_bytes),
    )


def said(session: Session, question: str, max_tokens: int) -> str:
    """The answer to a question, its likeliest tokens."""
    prompt = chat_tokens(session.loaded.tokenizer, [{"role": "user", "content": question}])
    settings = Settings(max_tokens=max_tokens)
    return "".join(p.text for p in answer(session, prompt, settings, Measured(PhaseMeter())))


def check_device(blas: str) -> Check:
    """MLX's device, and whether a product of matrices is what NumPy makes of it."""
    import numpy as np

    x = np.random.default_rng(0).normal(size=(256, 512)).astype(np.float32)
    product = np.array(mx.array(x) @ mx.array(x).T)
    error = float(np.abs(product - x @ x.T).max() / np.abs(x @ x.T).max())
    text = f"MLX computes on {backend()} ({blas})"
    if error > PRODUCT_ERROR:
        return Check("device", "failure", f"{text}: a product is off by {error:.1e}", "update MLX")
    return Check("device", "ok", text)


def write_model(config: dict[str, Any], dtype: str, folder: Path) -> None:
    """A model with random weights and a tokenizer of bytes, as mlx-lm saves and loads one."""
    from mlx_lm.utils import save_config, save_model

    mx.random.seed(0)
    model = lazy_model(config, None, dtype)
    mx.eval(model.parameters())
    folder.mkdir(parents=True, exist_ok=True)
    save_model(folder, model)
    save_config(dict(config), folder / "config.json")
    _write_tokenizer(folder)


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    writable: Any = tokenizer
    writable.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    writable.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
