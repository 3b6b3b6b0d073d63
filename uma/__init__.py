"""Unified-memory toolkit for Apple Silicon: what a model needs, before, during and after a run."""

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """``uma.measurement`` without an import of its own; nothing is loaded before it is used."""
    if name != "measurement":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return import_module("uma.measurement")
