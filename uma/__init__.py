"""Unified-memory toolkit for Apple Silicon: what a model needs, before, during and after a run."""

__version__ = "0.1.0"
