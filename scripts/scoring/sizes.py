"""Published sizes of quantized MLX repositories."""

import re
from collections.abc import Iterable, Iterator

from uma.architecture.layers import Architecture, Attention, Parameter, parameters
from uma.catalog import Model, model_config
from uma.checkpoint.free_names import find_format
from uma.errors import UmaError
from uma.memory.weights import parameter_bytes, parameter_quantization, weight_bytes
from uma.quantization import StoredQuantization

from .mlx import mlx_format
from .rows import FORMAT, METRIC, MODEL, MOST_BYTES, Row, Skipped, decimal, known_model
from .summary import Group

TEXT_ONLY = re.compile(r"[-_](lm|text)(?![a-z])", re.IGNORECASE)  # made by mlx-lm


def score(rows: Iterable[Row]) -> dict[str, Group]:
    """One group: the bytes of a repository's tensors by shapes and format."""
    group = Group("size", "mlx", "repository")
    for row in rows:
        name = row.get("rec_id") or row["mlx_repo"]
        try:
            group.errors[name] = _error(row)
        except Skipped as skipped:
            group.skipped[name] = str(skipped)
    return {"repository sizes": group}


def _error(row: Row) -> float:
    size = decimal(row["storage_bytes"])
    if not 1 <= size <= MOST_BYTES:
        raise Skipped(METRIC)
    model, architecture = known_model(row["mlx_repo"])
    config = model_config(model).values
    named = find_format(row["mlx_repo"])
    if named is None and "quantization_config" not in config:
        named = find_format(row["quantization"])
    chosen = mlx_format(architecture, named, config)
    original = row["mlx_repo"].lower() == model.hf_id.lower()
    try:
        weights = weight_bytes(architecture, chosen).size_bytes
        if original and isinstance(chosen, StoredQuantization):
            weights -= added_bytes(architecture, chosen)
        more = sum(parameter_bytes(part, chosen) for part in unused_keys(architecture))
    except (UmaError, ValueError) as error:
        raise Skipped(FORMAT) from error
    towers = 0 if TEXT_ONLY.search(row["mlx_repo"]) else tower_bytes(model, architecture)
    return (weights + more + towers) / size - 1


def added_bytes(architecture: Architecture, stored: StoredQuantization) -> int:
    """What MLX adds to a packed checkpoint: a bias for each scale, 2 bytes a group; and what it
    leaves out, two numbers of 8 bytes for the shape of each matrix (compressed-tensors).
    """
    added = 0
    for parameter in parameters(architecture):
        chosen = parameter_quantization(parameter, stored)
        if chosen is not None and chosen.mode == "affine":
            matrices = parameter.shape[0] if len(parameter.shape) == 3 else 1
            added += parameter.size // chosen.group_size * 2 - 16 * matrices
    return added


def unused_keys(architecture: Architecture) -> Iterator[Parameter]:
    """Matrices of layers that read another layer's cache, which checkpoints have all the same.

    Gemma 4 E2B and E4B: with them decoder and towers make the count that the hub states.
    """
    hidden = architecture.hidden_size
    for layer in architecture.layers:
        names = {parameter.name.rpartition(".")[2] for parameter in layer.parameters}
        for mixer in layer.mixers:
            if isinstance(mixer, Attention) and mixer.kv_source is not None:
                heads = mixer.num_key_value_heads
                for name, width in (("k_proj", mixer.head_dim), ("v_proj", mixer.v_head_dim)):
                    if name not in names:
                        yield Parameter(name, (heads * width, hidden), "matrix")
                if "k_norm" not in names:
                    yield Parameter("k_norm", (mixer.head_dim,), "other")


def tower_bytes(model: Model, architecture: Architecture) -> int:
    """Vision and audio towers, which conversions keep in 16 bits (mlx-vlm,
    ``skip_multimodal_module``).

    Where the config does not tell their size it is what the hub counts beside the decoder.

    Raises:
        Skipped: If neither tells it.
    """
    found = architecture.vision_parameters
    if found is None:
        if model.parameters_hf is None or architecture.mtp_parameters is None:
            raise Skipped(MODEL)
        found = model.parameters_hf - architecture.num_parameters - architecture.mtp_parameters
    return 2 * max(0, found)
