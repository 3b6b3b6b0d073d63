"""The two files of an adapter in mlx-lm's format, looked at before anything is loaded."""

import json
from pathlib import Path

from uma.checkpoint.safetensors import Header, read_header
from uma.errors import CheckpointError

CONFIG, WEIGHTS = "adapter_config.json", "adapters.safetensors"


def require_config(folder: Path) -> None:
    """Refuse a folder without the settings of an adapter, whoever wrote it.

    Raises:
        CheckpointError: With what is missing.
    """
    if folder.is_file():
        raise CheckpointError(f"{folder} is a file; give the folder that holds it: {folder.parent}")
    if not (folder / CONFIG).is_file():
        raise CheckpointError(f"{folder} holds no adapter: it has no {CONFIG}")


def adapter_header(folder: Path) -> Header:
    """The header of the adapter's arrays.

    Raises:
        CheckpointError: If there is no whole adapter of mlx-lm's format in the folder.
    """
    if (folder / "adapter_model.safetensors").exists():
        raise CheckpointError(
            f"{folder} is PEFT's adapter; make it mlx-lm's: uma lora import MODEL --adapter-path "
            "FOLDER -o NEW"
        )
    require_config(folder)
    try:
        json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / CONFIG} cannot be read: {error}") from None
    if not (folder / WEIGHTS).is_file():
        raise CheckpointError(f"{folder} holds no adapter: it has no {WEIGHTS}")
    try:
        header = read_header(folder / WEIGHTS)
    except CheckpointError as error:
        reason = str(error).removesuffix("; download it again")
        raise CheckpointError(f"{reason}; copy the adapter again, or train it again") from None
    for tensor in header.tensors:
        if tensor.dtype not in ("F32", "F16", "BF16"):
            raise CheckpointError(
                f"{folder / WEIGHTS}: {tensor.name} is {tensor.dtype}, and an adapter has numbers "
                "with fractions; copy the adapter again, or train it again"
            )
    return header
