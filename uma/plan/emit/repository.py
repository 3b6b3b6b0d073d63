"""The repository, or the folder, that other programs load a planned model from."""

from uma.catalog import model_config
from uma.checkpoint.names import resolve
from uma.checkpoint.source import CONFIG_ALONE
from uma.plan.compare.subject import Subject
from uma.plan.engine_words import stored_format


def repository(subject: Subject) -> str:
    """The model's own repository, whose weights are not quantized, else what was asked for."""
    source = subject.source
    if source.origin == CONFIG_ALONE:  # a folder, or the file in it
        return source.name.removesuffix("/config.json")
    if source.repo is None and source.path is not None:
        return str(source.path)
    model = resolve(source.name).model
    return model.hf_id if model is not None else source.name


def stored_in(subject: Subject) -> str:
    """The method by which the weights of ``repository`` are quantized; empty for 16 bits."""
    model = resolve(subject.source.name).model if subject.source.path is None else None
    config = subject.source.config if model is None else model_config(model).values
    return str(((config or {}).get("quantization_config") or {}).get("quant_method", ""))


def repository_in(subject: Subject, quant: str) -> str:
    """The repository with weights in ``quant`` of vLLM's, or words that no program takes for one.

    Only of what is asked for is it known how its weights are stored.
    """
    if not stored_as(subject, quant):
        return f"<a repository of {repository(subject)} in {quant}>"
    name = subject.source.name
    return name if subject.source.path is None and "/" in name else repository(subject)


def stored_as(subject: Subject, quant: str) -> bool:
    """Whether the model's configuration says that vLLM would load it in ``quant``."""
    return stored_format("vllm", subject.source.config or {}) == quant
