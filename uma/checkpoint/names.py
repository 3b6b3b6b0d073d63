"""What a model's name stands for: a hub id, an alias, ``repo:QUANT``, an Ollama-style tag."""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from uma.catalog import (
    TUNING,
    Model,
    Repository,
    find_model,
    find_repository,
    ids_of,
    models,
    nearest,
    repositories_of,
    short_name,
    words,
)
from uma.checkpoint.bounded_json import shown
from uma.errors import UnknownName, UsageError
from uma.frozen import dataclass

_TYPE = r"i?q\d\w*|[bf]f?p?(?:16|32)|mxfp4(?:-q8)?|mxfp8|nvfp4|int[48]|\d-?bits?"
_MODES = {"mxfp4": 4, "mxfp8": 8, "nvfp4": 4}
BITS = (2, 3, 4, 5, 6, 8, 16)


@dataclass(frozen=True, slots=True)
class Resolution:
    """What a name stands for.

    ``repo`` is what to load; ``model`` its catalog row, or None for a repository that is not in
    the catalog; ``repository`` the row of ``repo`` if it is known to hold MLX weights. ``bits``
    and ``mode`` are what was asked, in the name or beside it. ``gguf_type`` picks a file of a
    GGUF repository.
    """

    name: str
    repo: str
    model: Model | None = None
    repository: Repository | None = None
    bits: int | None = None
    mode: str | None = None
    gguf_type: str | None = None

    @property
    def quantize_on_load(self) -> bool:
        """Whether ``repo`` is a model's 16-bit original and fewer bits were asked."""
        original = self.repository is None or self.repository.bits == 16
        return original and self.gguf_type is None and self.bits not in (None, 16)


def parse_quant(text: str) -> tuple[int, str | None]:
    """Bits and mode of a format's name: ``Q4_K_M``, ``8bit``, ``bf16``, ``mxfp4``, ``5``.

    Raises:
        UsageError: If it is not one.

    >>> parse_quant("q4_K_M"), parse_quant("8bit"), parse_quant("bf16"), parse_quant("MXFP4-Q8")
    ((4, None), (8, None), (16, None), (4, 'mxfp4'))
    """
    plain = text.lower()
    mode = plain.split("-")[0]
    if mode in _MODES:
        return _MODES[mode], mode
    digits = re.search(r"\d+", plain)
    known = re.fullmatch(rf"{_TYPE}|\d+", plain)
    bits = int(digits[0]) if digits else 0
    bits = 16 if bits == 32 else bits  # what is stored in 32 bits is run in 16
    if not known or bits not in BITS:
        raise UsageError(
            f"{text!r} is not a format; bits: {', '.join(map(str, BITS))}; or mxfp4, mxfp8, nvfp4, "
            "or a GGUF type such as Q4_K_M"
        )
    return bits, None


def resolve(name: str, bits: int | None = None, quant: str | None = None) -> Resolution:
    """What ``name`` stands for, with ``bits`` or a format ``quant`` asked beside it.

    With fewer than 16 bits an alias gives a repository that is known to hold them, else the
    original, to be quantized on load. A hub id is taken as it is.

    Raises:
        UnknownName: If no model is called so, or several are.
        UsageError: If ``quant`` is not a format, or two different widths were asked.
    """
    mode = None
    if quant is not None:
        bits, mode = _agreed(name, bits, quant)
    if "/" in name:
        return _resolve_repository(name, bits, mode)
    hf_id, tag = _find(name)
    if tag is not None:
        bits, tag_mode = _agreed(name, bits, tag)
        mode = mode or tag_mode
    model = find_model(hf_id)
    known = None if bits in (None, 16) else _known_repository(hf_id, bits, mode)
    return Resolution(name, known.repo if known else hf_id, model, known, bits, mode)


def _agreed(name: str, bits: int | None, quant: str) -> tuple[int, str | None]:
    quant_bits, mode = parse_quant(quant)
    if bits not in (None, quant_bits):
        raise UsageError(f"{name}: {bits} bits and {quant} contradict each other; give one")
    return quant_bits, mode


def _resolve_repository(name: str, bits: int | None, mode: str | None) -> Resolution:
    """A hub id, with the model it was made from where the catalog knows that or its name says it.

    What follows a colon picks a file of a GGUF repository.
    """
    repo, _, gguf_type = name.partition(":")
    resolution = Resolution(name, repo, bits=bits, mode=mode, gguf_type=gguf_type or None)
    row = find_repository(repo)
    if row is not None:
        model = find_model(row.hf_id) if row.hf_id else None
        return replace(resolution, repo=row.repo, model=model, repository=row)
    model = find_model(repo)
    if model is not None:
        return replace(resolution, repo=model.hf_id, model=model)
    try:
        hf_id, tag = _find(re.sub(r"(?i)-(gguf|mlx)$", "", repo.partition("/")[2]))
    except UnknownName:
        return resolution
    held = None if tag is None else parse_quant(tag)[0]
    stored = Repository(repo, hf_id, held, "", None, "the repository's name", "")
    return replace(resolution, model=find_model(hf_id), repository=stored)


def _known_repository(hf_id: str, bits: int | None, mode: str | None) -> Repository | None:
    """A repository of that model with those bits; affine before other modes if none was asked."""
    rows = [row for row in repositories_of(hf_id) if row.bits == bits]
    wanted = [row for row in rows if row.mode == (mode or "affine")]
    return next(iter(wanted or (rows if mode is None else [])), None)


@cache
def _find(name: str) -> tuple[str, str | None]:
    """The hub id that an alias means, and the format at its end.

    Raises:
        UnknownName: If no model is called so, or several are.
    """
    plain = re.sub(r":latest$", "", name.strip())
    for text, tag in _without_type(plain):
        untuned = TUNING.sub("", re.sub(r"[\s_:]+", "-", text.lower()))
        for form in (text, untuned):
            ids = ids_of(words(form))
            if len(ids) > 1:
                raise UnknownName(f"{shown(name)} may be {', '.join(ids)}; give one of them")
            if ids:
                return ids[0], tag
    close = nearest(name, (short_name(model) for model in models()))
    raise UnknownName(
        f"no model is called {shown(name)}; nearest: {', '.join(close)}. "
        "A folder, a .gguf file, or a hub id (org/name) will do as well"
    )


def _without_type(name: str) -> Iterator[tuple[str, str | None]]:
    """The name as it is, then what stands before a format at its end, and that format."""
    yield name, None
    match = re.search(rf"[-_:.](?:mlx-)?({_TYPE})$", name, re.IGNORECASE)
    if match:
        yield name[: match.start()], match[1]
