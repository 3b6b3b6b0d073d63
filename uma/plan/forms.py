"""The forms in which a model's weights can be held, the preferred one first.

A 16-bit model is quantized to 4 bits on load unless asked otherwise; a quantized one stays as it
is stored. On MLX's CPU backend float32 comes first where it is the fast form and fits.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from uma.architecture.layers import Architecture, Experts, Parameter, parameters
from uma.checkpoint.names import parse_quant
from uma.checkpoint.source import ModelSource
from uma.errors import UsageError
from uma.frozen import dataclass
from uma.memory.term import MemoryTerm
from uma.memory.weights import parameter_bytes, weight_bytes
from uma.quantization import (
    DTYPE_BYTES,
    Quantization,
    StoredQuantization,
    quantization_for,
    quantization_of_config,
)
from uma.workload import Backend

if TYPE_CHECKING:
    from uma.checkpoint.safetensors import Header

DEFAULT_BITS = 4

SLOW_NOTE = (
    "16-bit numbers are slow on MLX's CPU backend: 30 times slower than float32 and more; "
    "a shorter --context, or more memory, may leave room for float32"
)

FormKind = Literal["stored", "float32_scales", "float32"]


@dataclass(frozen=True, slots=True)
class Form:
    """The weights as they will be held: their format's name, their term, the activations' width.

    ``kind`` is how they are made from what is stored: left or quantized (``stored``), with scales
    and all else in float32, or dequantized to float32. ``load_terms`` are what making them takes
    on top, while loading.
    """

    name: str
    weights: MemoryTerm
    activation_bytes: int
    load_terms: tuple[MemoryTerm, ...] = ()
    notes: tuple[str, ...] = ()
    quantization: Quantization | None = None
    kind: FormKind = "stored"


def forms_of(
    source: ModelSource,
    architecture: Architecture,
    *,
    bits: int | None = None,
    mode: str | None = None,
    group_size: int | None = None,
    backend: Backend = "metal",
) -> tuple[Form, ...]:
    """The forms to try, for a source whose ``config`` is known; on Metal there is one.

    On MLX's CPU backend products of float32 numbers are many times faster than of 16-bit ones, so
    the model in float32 comes first, and one with float32 scales second.

    Raises:
        UsageError: If the asked bits cannot be had from the stored weights.
    """
    stored = quantization_of_config(source.config or {})
    asked = bits is not None or mode is not None or group_size is not None
    if stored is not None:
        wanted = quantization_for(bits, mode, group_size) if asked else None
        form = _stored_form(source, architecture, stored, wanted, bits)
    elif not asked and _made_for_mlx(source):
        form = _full_form(source, architecture)
    else:
        usual = None if mode else DEFAULT_BITS
        wanted = quantization_for(usual if bits is None else bits, mode, group_size)
        form = (
            _full_form(source, architecture)
            if wanted is None
            else _quantized_form(source, architecture, wanted)
        )
    if backend == "metal" or architecture.dtype == "float32":
        return (form,)
    form = replace(form, notes=(*form.notes, SLOW_NOTE))
    scaled = _float32_scales_form(architecture, form, stored)
    packed = form.quantization or stored
    return (_float32_form(architecture, form, packed), *([scaled] if scaled else []), form)


def asked_format(
    source: ModelSource | None,
    *,
    bits: int | None = None,
    mode: str | None = None,
    group_size: int | None = None,
    quant: str | None = None,
) -> dict[str, Any]:
    """Bits, mode and group size as they are asked, ``quant`` being a format by name.

    Where nothing is asked they are those of the name that a catalog model was found by, unless it
    is stored quantized.
    """
    if quant is not None and (bits, mode) == (None, None):
        bits, mode = parse_quant(quant)
    asked = {"bits": bits, "mode": mode, "group_size": group_size}
    if any(value is not None for value in asked.values()):
        return asked
    if source is None or source.kind != "catalog" or source.resolution is None:
        return {}
    if quantization_of_config(source.config or {}) is not None:
        return {}
    return asked | {"bits": source.resolution.bits, "mode": source.resolution.mode}


def bits_of(form: Form, source: ModelSource) -> int:
    """The usual width of the weights in ``form``: as they are made, else as they are stored."""
    held = form.quantization
    if held is None and (stored := quantization_of_config(source.config or {})) is not None:
        held = stored.default
    return 16 if held is None else held.bits


def by_speed(
    forms: tuple[Form, ...],
    architecture: Architecture,
    config: dict[str, Any],
    form_rates: Callable[..., dict[FormKind, float]],
) -> tuple[Form, ...]:
    """The forms that a backend can run, the fastest first by what ``form_rates`` times there.

    The stored form stands behind another only if that is 1.2 times as fast.
    """
    parts = [part for layer in architecture.layers for part in layer.feed_forward]
    experts = any(isinstance(part, Experts) for part in parts)
    stored = quantization_of_config(config)
    packed = forms[-1].quantization or (stored.default if stored else None)
    rates = form_rates(packed, architecture.dtype, experts=experts)
    times = {kind: s / (1.2 if kind == "stored" else 1.0) for kind, s in rates.items()}
    able = [form for form in forms if form.kind in times]
    return tuple(sorted(able, key=lambda form: times[form.kind]))


def _made_for_mlx(source: ModelSource) -> bool:
    """Whether somebody chose the form of these weights: it is kept unless another one is asked."""
    converted = source.kind in ("mlx", "gguf", "default")
    return converted or any(h.metadata.get("format") == "mlx" for h in source.headers)


def _stored_form(
    source: ModelSource,
    architecture: Architecture,
    stored: StoredQuantization,
    wanted: Quantization | None,
    bits: int | None,
) -> Form:
    """As stored; or requantized, where fewer bits are asked."""
    if bits == 16 or (wanted is not None and wanted.bits > stored.default.bits):
        raise UsageError(
            f"{source.name} holds {stored.default.bits}-bit weights; more bits cannot be had from "
            "them: leave --bits out, or give the 16-bit model"
        )
    if wanted is not None and wanted != stored.default:
        return _quantized_form(source, architecture, wanted)
    width = DTYPE_BYTES[architecture.dtype]
    weights = _from_headers(source.headers, architecture)
    return Form(str(stored.default), weights or weight_bytes(architecture, stored, width), width)


def _full_form(source: ModelSource, architecture: Architecture) -> Form:
    width = DTYPE_BYTES[architecture.dtype]
    weights = _from_headers(source.headers, architecture) or weight_bytes(architecture, None, width)
    return Form(architecture.dtype, weights, width)


def _quantized_form(
    source: ModelSource, architecture: Architecture, quantization: Quantization
) -> Form:
    width = DTYPE_BYTES[architecture.dtype]
    weights = weight_bytes(architecture, quantization, width)
    if source.kind != "catalog":
        weights = replace(weights, source=f"config shapes x {quantization}")
    load = _load_terms(architecture, None, quantization, width, width)
    resolution = source.resolution
    if source.kind == "catalog" and resolution is not None and not resolution.quantize_on_load:
        # The repository that the name stands for holds these bits already.
        return Form(str(quantization), weights, width, quantization=quantization)
    notes = (f"quantized to {quantization} while it is loaded",)
    return Form(str(quantization), weights, width, load, notes, quantization=quantization)


def _float32_scales_form(
    architecture: Architecture, base: Form, stored: StoredQuantization | None
) -> Form | None:
    """Packed matrices as in ``base``; scales, biases, norms and activations in float32."""
    formats = base.quantization or stored
    if formats is None:
        return None
    weights = weight_bytes(architecture, formats, 4)
    return replace(
        base,
        name=f"{base.name}, float32 scales",
        weights=replace(weights, source=f"config shapes x {base.name}, float32 scales"),
        activation_bytes=4,
        notes=(*base.notes[:-1], *_float32_notes(weights, base)),
        kind="float32_scales",
    )


def _float32_form(
    architecture: Architecture, base: Form, packed: Quantization | StoredQuantization | None
) -> Form:
    """Every parameter as float32."""
    weights = replace(weight_bytes(architecture, None, 4), source="config shapes x float32")
    load = _load_terms(architecture, packed, None, DTYPE_BYTES[architecture.dtype], 4)
    notes = (*base.notes[:-1], *_float32_notes(weights, base))
    return replace(
        base,
        name="float32",
        weights=weights,
        activation_bytes=4,
        load_terms=load,
        notes=notes,
        kind="float32",
    )


def _load_terms(
    architecture: Architecture,
    stored: Quantization | StoredQuantization | None,
    made: Quantization | None,
    stored_width: int,
    made_width: int,
) -> tuple[MemoryTerm, ...]:
    """What loading holds above the result at its worst, converting one matrix after another.

    What is outside the layers comes first (``uma.runtime.load``). Experts of a full-precision
    checkpoint are mostly stored one by one, and exist twice while they are stacked.
    """
    kinds: dict[int, tuple[int, int]] = {}
    held, most = _making(architecture.parameters, stored, made, stored_width, made_width)
    for layer, alike in zip(architecture.layers, architecture.alike, strict=True):
        by_name = isinstance(stored, StoredQuantization)
        kind = layer if by_name else alike
        if id(kind) not in kinds:
            inside = sorted(kind.parameters, key=lambda p: len(p.shape))
            kinds[id(kind)] = _making(inside, stored, made, stored_width, made_width)
        more, peak = kinds[id(kind)]
        most = max(most, held + peak)
        held += more
    above = max(0, most - held)
    return (MemoryTerm("other", above, "bound", "the last matrices before conversion", "load"),)


def _making(
    some: Iterable[Parameter],
    stored: Quantization | StoredQuantization | None,
    made: Quantization | None,
    stored_width: int,
    made_width: int,
) -> tuple[int, int]:
    """What these parameters hold once they are made, and at most while they are."""
    held = most = 0
    for parameter in some:
        held += parameter_bytes(parameter, made, made_width)
        copies = 2 if stored is None and len(parameter.shape) == 3 else 1
        most = max(most, held + copies * parameter_bytes(parameter, stored, stored_width))
    return held, most


def _float32_notes(weights: MemoryTerm, base: Form) -> tuple[str, ...]:
    """None where the base is float32 already."""
    times = weights.size_bytes / base.weights.size_bytes
    if times < 1.05:
        return ()
    return (
        f"{times:.1f} times the bytes of {base.name}, because MLX's CPU backend is faster with "
        "float32 (--dequantize never keeps the stored form)",
    )


def _from_headers(headers: "tuple[Header, ...]", architecture: Architecture) -> MemoryTerm | None:
    """The bytes of the tensors that the model loads, if the files name them as mlx-lm does."""
    names = {p.name for p in parameters(architecture)}
    held: set[str] = set()
    size_bytes = 0
    for header in headers:
        for tensor in header.tensors:
            name = _parameter_name(tensor.name)
            if name in names:
                held.add(name)
                size_bytes += tensor.size_bytes
    if held != names:
        return None
    return MemoryTerm("weights", size_bytes, "exact", "safetensors headers")


def _parameter_name(tensor: str) -> str:
    """A tensor's name as ``Parameter`` has it: without ``.weight``, ``.scales`` or ``.biases``."""
    for ending in (".weight", ".scales", ".biases"):
        if tensor.endswith(ending):
            return tensor.removesuffix(ending)
    return tensor
