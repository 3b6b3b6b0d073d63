"""Published sizes of quantized MLX repositories."""

from collections.abc import Iterable

from uma.architecture.layers import Architecture
from uma.catalog import model_config
from uma.checkpoint.free_names import find_format
from uma.units import MIB

from .mlx import weights_term
from .rows import MODEL, UNTRUSTWORTHY, Row, Skipped, Subject, known_model
from .summary import Group


def score(rows: Iterable[Row]) -> dict[str, Group]:
    """One group: the bytes of a repository's tensors by shapes and format."""
    group = Group("size", "mlx", "repository")
    for row in rows:
        try:
            group.errors[row["mlx_repo"]] = _error(row)
        except Skipped as skipped:
            group.skipped[row["mlx_repo"]] = str(skipped)
    return {"repository sizes": group}


def _error(row: Row) -> float:
    size = int(row["storage_bytes"])
    if size % MIB == 0 or size % 10_000_000 == 0:
        raise Skipped(UNTRUSTWORTHY)  # rounded: no sum of tensors is a whole number of those
    model, architecture = known_model(row["mlx_repo"])
    named = find_format(row["mlx_repo"])
    if named is None and "quantization_config" not in model_config(model).values:
        named = find_format(row["quantization"])
    subject = Subject(model, architecture, named)
    weights = weights_term(architecture, subject).size_bytes
    return (weights + tower_bytes(architecture)) / size - 1


def tower_bytes(architecture: Architecture) -> int:
    """A vision tower, which conversions keep in 16 bits (mlx-vlm, ``skip_multimodal_module``).

    Raises:
        Skipped: If the model has one and its config does not tell its size.
    """
    if architecture.vision_parameters is None:
        raise Skipped(MODEL)
    return 2 * architecture.vision_parameters
