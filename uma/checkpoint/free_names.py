"""What a model's name means as people write it: a catalog model, and the format of its weights.

Benchmarks name models by quantized repositories, GGUF files, Ollama tags or in free words. A name
is read by general rules, all of them in the tables below: where the format stands in it, which
words say nothing about shapes, which models share their shapes with another one. A name that the
rules do not explain to the last word is unknown: nothing is guessed from what is similar.
"""

import csv
import re
from dataclasses import dataclass
from functools import cache

from uma.catalog import DATA, Model, aliases, find_model, models, words
from uma.checkpoint.bounded_json import shown
from uma.errors import UnknownName


@dataclass(frozen=True, slots=True)
class NamedFormat:
    """A format as a name tells it.

    ``scheme`` is ``float`` (``name`` its dtype), ``bits`` (a width, the scheme left to the
    engine), ``affine``, ``mxfp4``, ``mxfp8``, ``nvfp4``, ``gguf`` (``name`` its type), ``gptq``,
    ``awq``, ``nf4``, ``int8``, ``fp8``, ``compressed-tensors`` (``name`` its widths) or ``mixed``:
    a recipe with several widths that a name does not tell apart.
    """

    scheme: str
    name: str
    bits: int | None = None
    group_size: int | None = None


@dataclass(frozen=True, slots=True)
class FreeName:
    """What a free name means: the catalog's row, and the format if the name tells one."""

    model: Model
    format: NamedFormat | None


_START = r"(?<![a-z0-9])(?<!\d\.)"
_END = r"(?![a-z0-9])"

# Formats as names write them, the more specific first. A group ``bits`` is the width, ``name`` the
# type. What a recipe's name alone does not tell (which tensors get which width) is ``mixed``.
_FORMATS: tuple[tuple[str, str], ...] = tuple(
    (scheme, _START + pattern + _END)
    for scheme, pattern in (
        ("float", r"q4_0[-_](?P<name>unquantized)"),  # trained for a format, not stored in it
        ("mixed", r"ud([-_]i?q\d\w*)?"),  # Unsloth's dynamic GGUF files
        ("mixed", r"unsloth[-_]bnb[-_]4[-_]?bits?"),  # some matrices stay in 16 bits
        ("mixed", r"(unsloth )?i?q\d_k_xl"),
        ("mixed", r"dq\d(_k_m|plus)?([-_]q\d)?"),
        ("mixed", r"o(ptiq|q\d)[-_ ]?(\d?bits?)?(\d[-_ ]?bits?)?"),
        ("mixed", r"iq[-_]mlx|mixed([-_ ]?\d([-_/]\d)*([-_ ]?bits?)?)?"),
        ("mixed", r"tq\d+|turboquant|quip|aqlm|config[iv]+|jang\w*|exl[23]|hqq|eetq|q4f16_\d"),
        ("mixed", r"(int\d[-_ ]|w\da\d+[-_ ])?auto[-_]?round([-_ ](int\d|w\da\d+|gptq|awq))?"),
        ("mixed", r"(?<!- )\d+(\.\d+)? ?bpw|iq3_s mix( - 3\.66 bpw)?"),
        ("compressed-tensors", r"(quantized\.)?(?P<name>w\d+a\d+)"),
        ("mxfp4-q", r"mxfp4[-_]q(?P<bits>[2-8])"),
        ("mxfp4", r"mxfp4([_ ]moe)?"),
        ("mxfp8", r"(8[-_ ]?bits?[-_])?mxfp8"),
        ("nvfp4", r"nv-?fp4|fp4"),
        ("gptq", r"gptq([-_ ]?int(?P<bits>\d))?([-_ ](?P<wide>\d)[-_ ]?bits?)?"),
        ("awq", r"awq([-_ ]?int(?P<bits>\d))?([-_ ](?P<wide>\d)[-_ ]?bits?)?"),
        ("int8", r"(bnb|bitsandbytes)[-_ ]8[-_ ]?bits?|llm\.int8(\(\))?"),
        ("nf4", r"(bnb|bitsandbytes)([-_ ]4[-_ ]?bits?)?|nf4"),
        ("fp8", r"fp8(_e4m3\w*)?|float8"),
        (
            "gguf",
            r"(?P<name>i?q\d_(k|\d|[a-z]{1,3})(_[a-z]{1,2})?)"
            r"( - ((?P<size>medium|small|large)|\d(\.\d+)? bpw))?",
        ),
        ("bits", r"(?P<bits>[2-8])[-_ ]?bits?"),
        ("bits", r"int(?P<bits>[248])|q(?P<wide>[2-8])"),
        ("float", r"(?P<name>bf16|bfloat16|fp16|float16|f16|fp32|float32|f32)"),
    )
)
_FLOATS = {
    "bf16": "bfloat16",
    "f16": "float16",
    "fp16": "float16",
    "f32": "float32",
    "fp32": "float32",
    "unquantized": "bfloat16",
}
_SIZES = {"medium": "_M", "small": "_S", "large": "_L"}
_GROUP = re.compile(r"(?<![a-z0-9])(?:gs?|group[-_ ]?(?:size)?[-_ ]?)(32|64|128)(?![a-z0-9])")
_ALSO_GROUP = re.compile(r"(?<![a-z0-9])(32|64|128)g(?![a-z0-9])")

# Words that leave the shapes of the text model as they are: tuning, calibration, packing, makers.
_NEUTRAL = re.compile(
    "instruct|it|chat|hf|base|pt|thinking|reasoning|instruction|qat|dwq|mlx|gguf|ggml|affine|"
    "safetensors|meta|nvidia|google|unsloth|optimized|speed|text|only|full|precision|imatrix|imat|"
    "abliterated|uncensored|heretic|huihui|josiefied|lora|finetune|sft|dpo|tuned|default|act|order|"
    "actorder|true|quantized|gemm|gemv|marlin|dynamic|block|lm|ct|mostly"
)
_SHARD = re.compile(r"-\d{5}-of-?(\d{5})?$")
_DATE = re.compile(
    r"(?<![\d.])(?:\d{2}-\d{4}|2[3-9](?:0[1-9]|1[0-2])|(?:0[1-9]|1[0-2])[0-3]\d)(?![\d.])"
)
_SIZE = re.compile(r"(?<![a-z0-9.])[ex]?\d+(\.\d+)?(x\d+(\.\d+)?)? ?b(?![a-z0-9])")
_ACTIVE = re.compile(r"(?<=\db)[-_ ]a\d+(\.\d+)?b(?![a-z0-9])")


def read_name(text: str) -> FreeName:
    """The model and the format that ``text`` names.

    Raises:
        UnknownName: If a word of it is not explained, or several models are meant.

    >>> read_name("mlx-community/Qwen3-235B-A22B-Thinking-4bit-DWQ").model.hf_id
    'Qwen/Qwen3-235B-A22B'
    >>> read_name("Meta-Llama-3-8B-Instruct.Q4_K_M.gguf").format.name
    'Q4_K_M'
    """
    return FreeName(find_free(text), find_format(text))


def find_format(text: str) -> NamedFormat | None:
    """The first format that ``text`` names in the order of the table, or None.

    >>> find_format("GLM-4.7-8bit-gs32")
    NamedFormat(scheme='bits', name='8bit', bits=8, group_size=32)
    """
    plain = text.lower()
    group = _GROUP.search(plain) or _ALSO_GROUP.search(plain)
    for scheme, pattern in _FORMATS:
        match = re.search(pattern, plain)
        if match is None:
            continue
        found = {key: value for key, value in match.groupdict().items() if value}
        bits = found.get("bits") or found.get("wide")
        name = found.get("name", match[0])
        if scheme == "gguf":
            name = name.upper() + _SIZES.get(found.get("size", ""), "")
        if scheme == "float":
            name = _FLOATS.get(name, name)
        return NamedFormat(
            scheme, name, int(bits) if bits else None, int(group[1]) if group else None
        )
    return None


def find_free(text: str) -> Model:
    """The catalog's row that ``text`` names, formats and neutral words aside.

    A row counts whose name has the same words; several rows count if their models have the same
    shapes (as many parameters, of the same type). Where a size is named as well, a date and the
    active parameters may be left out.

    Raises:
        UnknownName: If there is none, or several of different shapes.
    """
    for key in _keys(text):
        found = _rows().get(key)
        if found is None:
            continue
        if len({(model.model_type, model.parameters) for model in found}) != 1:
            break
        return found[0]
    raise UnknownName(f"no one model of the catalog is called {shown(text)}")


def _keys(text: str) -> list[tuple[str, ...]]:
    """The words of a name, in forms that leave out more and more of what decides nothing."""
    if re.search(r"\s/\s", text):
        return []  # two names
    plain = re.sub(r"\([^)]*\)", " ", text.lower()).strip().rpartition("/")[2]
    plain = re.sub(r":latest$|\.(gguf|ggml|bin)$", "", plain)
    plain = _without_maker(_SHARD.sub("", plain))
    forms = [plain, _without_formats(plain)]
    if _SIZE.search(plain):
        forms.append(_DATE.sub(" ", forms[-1]))
        forms.append(_ACTIVE.sub("", forms[-1]))
    keys = [words(form) for form in forms]
    with_neutral = [pair for key in keys for pair in (key, _neutral(key))]
    return [key for key in dict.fromkeys(with_neutral) if key]


def _without_maker(plain: str) -> str:
    """Without the ``maker_`` before a file's name, where the catalog knows that maker."""
    maker, mark, rest = plain.partition("_")
    return rest if mark and maker in _makers() else plain


def _without_formats(plain: str) -> str:
    plain = _ALSO_GROUP.sub(" ", _GROUP.sub(" ", plain))
    for _, pattern in _FORMATS:
        plain = re.sub(pattern, " ", plain)
    return plain


def _neutral(key: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word for word in key if not _NEUTRAL.fullmatch(word))


@cache
def _makers() -> frozenset[str]:
    return frozenset(model.hf_id.partition("/")[0].lower() for model in models())


@cache
def _rows() -> dict[tuple[str, ...], tuple[Model, ...]]:
    """Rows by the words of their names, the fuller forms first; then the tags of ``aliases.csv``.

    ``same_shapes.csv`` has names of models outside the catalog: with the row whose shapes they
    share, or with none where the rules would read another model's name in them.
    """
    levels: list[list[tuple[tuple[str, ...], Model]]] = [[], []]
    levels += [[] for _ in range(8)]
    taken: set[tuple[str, ...]] = set()
    for name, hf_id in _same_shapes():
        same = find_model(hf_id)
        for level, key in enumerate(_keys(name)):
            if same is None:
                taken.add(key)
            else:
                levels[level].append((key, same))
    for model in models():
        for level, key in enumerate(_keys(model.hf_id)):
            levels[level].append((key, model))
    for key, ids in aliases().items():
        tagged = find_model(ids[0]) if len(ids) == 1 else None
        sized = _SIZE.search(" ".join(key)) or not _SIZE.search(ids[0].lower())
        if tagged is not None and sized:
            levels[-1].append((key, tagged))
    rows: dict[tuple[str, ...], tuple[Model, ...]] = dict.fromkeys(taken, ())
    for level_rows in levels:
        added: dict[tuple[str, ...], tuple[Model, ...]] = {}
        for key, model in level_rows:
            added[key] = tuple(dict.fromkeys((*added.get(key, ()), model)))
        rows = added | rows
    return rows


@cache
def _same_shapes() -> tuple[tuple[str, str], ...]:
    with open(DATA / "same_shapes.csv", encoding="utf-8", newline="") as file:
        next(file)
        return tuple((row["name"], row["hf_id"]) for row in csv.DictReader(file))
