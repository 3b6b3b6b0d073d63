"""Keys of a ``config.json``, read by name: a missing one is an error or a written default."""

from collections.abc import Callable, Mapping
from typing import Any

from uma.architecture.defaults import class_defaults
from uma.architecture.layers import Architecture
from uma.errors import CheckpointError

# A file without these describes no model.
ESSENTIAL = frozenset({"hidden_size", "num_hidden_layers"})


class Config:
    """The keys of one model, over the defaults of the classes that run it.

    ``config.hidden_size`` reads a key; a key that is missing or null takes mlx-lm's default, then
    that of the config around it, then transformers' one, and is an error where there is none.
    ``config.get`` keeps a null, for the keys where it means "none". ``filled`` are the keys that
    transformers' defaults gave.
    """

    __slots__ = ("_defaults", "_model_type", "_outer", "_values", "filled")

    def __init__(
        self,
        values: Mapping[str, Any],
        defaults: Mapping[str, Any] | None = None,
        outer: Mapping[str, Any] | None = None,
        filled: dict[str, Any] | None = None,
    ):
        """``outer`` is the config that ``values`` is nested in."""
        self._values = values
        self._defaults = defaults or {}
        self._outer = outer or {}
        self._model_type = str(values.get("model_type"))
        self.filled: dict[str, Any] = {} if filled is None else filled

    def __getattr__(self, key: str) -> Any:
        value = self._values.get(key)
        if value is not None:
            return value
        if key in self._defaults:
            return self._defaults[key]
        if self._outer.get(key) is not None:
            return self._outer[key]
        layers = self._values.get("layer_types") or self._values.get("attn_type_list")
        if key == "num_hidden_layers" and isinstance(layers, list):
            return len(layers)
        defaults = class_defaults(self._model_type)[0]
        if key in defaults and key not in ESSENTIAL:
            self.filled[key] = defaults[key]
            return defaults[key]
        raise CheckpointError(f"config.json has no {key!r}, which its model_type needs")

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def get(self, key: str, default: Any = None) -> Any:
        """The key as it stands in the file, null included, else the default."""
        for known in (self._values, self._defaults):
            if key in known:
                return known[key]
        value = class_defaults(self._model_type)[0].get(key)
        if value is None:
            return default
        self.filled[key] = value
        return value

    def stored(self, key: str) -> Any:
        """The key as it stands in the file; ``None`` where a default would stand in for it."""
        return self._values.get(key)

    def around(self, key: str) -> Any:
        """The key of the config that this one is nested in; ``None`` if it has none."""
        return self._outer.get(key)

    def named(self, **values: Any) -> "Config":
        """The same keys with some by the names that others have for them."""
        return Config({**self._values, **values}, self._defaults, self._outer, self.filled)

    @property
    def kv_heads(self) -> int:
        """``num_key_value_heads``, which mlx-lm takes from ``num_attention_heads`` if absent."""
        return int(self.get("num_key_value_heads") or self.num_attention_heads)

    @property
    def head_width(self) -> int:
        """``head_dim``, else ``hidden_size`` split over the heads."""
        return int(self.get("head_dim") or self.hidden_size // self.num_attention_heads)


Module = tuple[Callable[[Config], Architecture], dict[str, Any]]
Modules = dict[str, Module]
"""Files of ``mlx_lm.models`` to the function that lays each out and its default keys."""
