"""``dataclass(frozen=True, slots=True)`` for what a short command imports, defined in less time.

The standard one compiles six functions for every class: half a millisecond, which for the fifty
classes of an estimate is more than the estimate itself takes (Python 3.11). Here the methods are
shared, and ``__init__`` is compiled for classes with many instances alone: a tenth. What comes out
are dataclasses: ``replace``, ``fields`` and ``asdict`` take them. Inheritance, keyword-only fields
and the like are not for it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:
    import dataclasses
    from operator import attrgetter

    # Compiling takes as much as matching the arguments of 50 instances; most classes have few.
    _FEW = 8
    _MISSING = dataclasses.MISSING
    _set = object.__setattr__

    def dataclass(*, frozen, slots=False):
        """``dataclasses.dataclass`` of a class that is ``frozen``, and nothing else."""
        assert frozen
        return lambda cls: _frozen(cls, slots)

    def _frozen(cls, slots):
        cls.__doc__ = cls.__doc__ or cls.__name__  # else it is made of the signature, at length
        cls = dataclasses.dataclass(init=False, repr=False, eq=False)(cls)
        fields = dataclasses.fields(cls)
        compared = [field.name for field in fields if field.compare]
        eq, hash_ = _comparing(attrgetter(*compared) if compared else bool)
        shared = {
            "__init__": _init(cls, fields),
            "__repr__": _repr,
            "__eq__": eq,
            "__hash__": hash_,
            "__setattr__": _refuse,
            "__delattr__": _refuse,
        }
        body = {**shared, **cls.__dict__, "__qualname__": cls.__qualname__}
        if slots:
            names = tuple(field.name for field in fields)
            body |= {"__getstate__": _getstate, "__setstate__": _setstate, "__slots__": names}
            body = {name: value for name, value in body.items() if name not in names}
        for name in ("__dict__", "__weakref__"):  # the new class gets its own
            body.pop(name, None)
        return type(cls)(cls.__name__, cls.__bases__, body)

    def _init(cls, fields):
        """An ``__init__`` that matches its arguments itself, for the first few instances."""
        names = [field.name for field in fields]
        made = {f.name: f.default_factory for f in fields if f.default_factory is not _MISSING}
        defaults = {f.name: f.default for f in fields if f.default is not _MISSING}
        defaults |= dict.fromkeys(made, _MISSING)
        every = dict.fromkeys(names).keys()
        checked = hasattr(cls, "__post_init__")
        left = _FEW

        def __init__(self, *values, **named):
            nonlocal left
            left -= 1
            asked = dict(zip(names, values, strict=False)) | named
            given = defaults | asked
            twice = len(asked) < len(values) + len(named)
            if left < 0 or twice or given.keys() != every:  # the compiled one says what is wrong
                type(self).__init__ = _compiled(type(self), fields)
                self.__init__(*values, **named)
                return
            for name, value in given.items():
                _set(self, name, made[name]() if value is _MISSING else value)
            if checked:
                self.__post_init__()

        return _of_class(__init__, cls, fields)

    def _compiled(cls, fields):
        known = {"_set": _set, "_unset": _MISSING}
        parameters, lines = [], []
        for field in fields:
            name, value = field.name, field.name
            if field.default is not _MISSING:
                known[f"_{name}"] = field.default
                parameters.append(f"{name}=_{name}")
            elif field.default_factory is not _MISSING:
                known[f"_{name}"] = field.default_factory
                parameters.append(f"{name}=_unset")
                value = f"_{name}() if {name} is _unset else {name}"
            else:
                parameters.append(name)
            if hasattr(cls, "__slots__"):
                known[f"_set_{name}"] = getattr(cls, name).__set__
                lines.append(f" _set_{name}(self, {value})\n")
            else:
                lines.append(f" _set(self, {name!r}, {value})\n")
        if hasattr(cls, "__post_init__"):
            lines.append(" self.__post_init__()\n")
        exec(f"def __init__(self, {', '.join(parameters)}):\n{''.join(lines)}", known)
        return _of_class(known["__init__"], cls, fields)

    def _of_class(init, cls, fields):
        init.__annotations__ = {field.name: field.type for field in fields}
        init.__qualname__ = f"{cls.__qualname__}.__init__"
        return init

    def _repr(self):
        shown = (f for f in dataclasses.fields(self) if f.repr)
        parts = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in shown)
        return f"{self.__class__.__qualname__}({parts})"

    def _comparing(values):
        """Equality and hash by what ``values`` gives of an instance."""

        def eq(self, other):
            if other.__class__ is not self.__class__:
                return NotImplemented
            return values(self) == values(other)

        def hash_(self):
            return hash(values(self))

        return eq, hash_

    def _refuse(self, name, *value):
        raise dataclasses.FrozenInstanceError(f"{type(self).__name__}.{name} cannot be changed")

    def _getstate(self):
        return [getattr(self, name) for name in self.__slots__]

    def _setstate(self, state):
        for name, value in zip(self.__slots__, state, strict=True):
            object.__setattr__(self, name, value)
