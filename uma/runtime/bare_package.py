"""``mlx_lm.models`` without the rest of mlx-lm, which loads transformers and takes a second."""

import sys
from importlib.util import find_spec, module_from_spec
from typing import Any

PACKAGE = "mlx_lm"


def bare_mlx_lm() -> None:
    """Put off ``mlx_lm/__init__.py`` (0.32.2) until something of the package itself is asked for.

    Its modules can be imported before that. Nothing is done where it has run already.
    """
    spec = None if PACKAGE in sys.modules else find_spec(PACKAGE)
    if spec is None or spec.loader is None:
        return
    module, loader = module_from_spec(spec), spec.loader

    def rest(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        del module.__dict__["__getattr__"]
        loader.exec_module(module)
        return getattr(module, name)

    module.__dict__["__getattr__"] = rest
    sys.modules[PACKAGE] = module
