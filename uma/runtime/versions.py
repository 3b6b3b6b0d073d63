"""Versions of what a run stood on."""

import platform
from importlib.metadata import PackageNotFoundError, version

from uma import __version__


def versions() -> dict[str, str | None]:
    """Of uma, Python, MLX and mlx-lm; ``None`` for what is not installed."""
    return {
        "uma": __version__,
        "python": platform.python_version(),
        "mlx": _installed("mlx"),
        "mlx_lm": _installed("mlx-lm"),
    }


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
