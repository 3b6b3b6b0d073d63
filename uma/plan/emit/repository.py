"""The repository, or the folder, that other programs load a planned model from."""

from uma.checkpoint.names import resolve
from uma.plan.compare.subject import Subject


def repository(subject: Subject) -> str:
    """The model's own repository, whose weights are not quantized, else what was asked for."""
    source = subject.source
    if source.repo is None and source.path is not None:
        return str(source.path)
    model = resolve(source.name).model
    return model.hf_id if model is not None else source.name
