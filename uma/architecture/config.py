"""Keys of a ``config.json``, read by name: a missing one is an error or a written default."""

from collections.abc import Callable, Mapping
from typing import Any

from uma.architecture.layers import Architecture
from uma.errors import CheckpointError


class Config:
    """The keys of one model, over the defaults of the class that runs it.

    ``config.hidden_size`` reads a key; a key that is missing or null takes the default, and is an
    error where there is none. ``config.get`` keeps a null, for the keys where it means "none".
    """

    __slots__ = ("_defaults", "_outer", "_values")

    def __init__(
        self,
        values: Mapping[str, Any],
        defaults: Mapping[str, Any] | None = None,
        outer: Mapping[str, Any] | None = None,
    ):
        """``outer`` is the config that ``values`` is nested in, asked last."""
        self._values = values
        self._defaults = defaults or {}
        self._outer = outer or {}

    def __getattr__(self, key: str) -> Any:
        value = self._values.get(key)
        if value is not None:
            return value
        if key in self._defaults:
            return self._defaults[key]
        if self._outer.get(key) is not None:
            return self._outer[key]
        raise CheckpointError(f"config.json has no {key!r}, which its model_type needs")

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def get(self, key: str, default: Any = None) -> Any:
        """The key as it stands in the file, null included, else the default."""
        return self._values.get(key, self._defaults.get(key, default))

    def named(self, **values: Any) -> "Config":
        """The same keys with some by the names that others have for them."""
        return Config({**self._values, **values}, self._defaults, self._outer)

    @property
    def kv_heads(self) -> int:
        """``num_key_value_heads``, which mlx-lm takes from ``num_attention_heads`` if absent."""
        return int(self.get("num_key_value_heads") or self.num_attention_heads)

    @property
    def head_width(self) -> int:
        """``head_dim``, else ``hidden_size`` split over the heads."""
        return int(self.get("head_dim") or self.hidden_size // self.num_attention_heads)


Modules = dict[str, tuple[Callable[[Config], Architecture], dict[str, Any]]]
"""Files of ``mlx_lm.models`` to the function that lays each out and its default keys."""
