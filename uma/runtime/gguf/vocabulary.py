"""The vocabulary of a GGUF file: its tokens, their kinds, the ids with a role.

Keys and token types: gguf-py/gguf/constants.py (``Keys.Tokenizer``, ``TokenType``); defaults:
src/llama-vocab.cpp (``llama_vocab::impl::load``); both llama.cpp b11434.
"""

from dataclasses import dataclass

from uma.checkpoint.gguf import GGUFHeader
from uma.errors import CheckpointError, UnsupportedModel
from uma.runtime.gguf.metadata import Metadata
from uma.runtime.gguf.pretokenizers import Pretokenizer, pretokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

MODELS = ("gpt2", "llama")
"""``tokenizer.ggml.model``: byte-level BPE, and SentencePiece merging by score."""

END_OF_TURN = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|eom_id|>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    }
)
"""Texts that end an answer and are control tokens, whatever the file says of them.

llama.cpp's list (``special_eog_ids``) without those that are words of other vocabularies, such as
``</s>`` in Qwen's.
"""

MAX_TEMPLATE_CHARACTERS = 1 << 20


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the tokenizer is made of; token ids are positions in ``tokens``.

    ``pre`` is ``None`` for SentencePiece, ``scores`` and ``merges`` are empty where unused.
    ``stop_ids`` are the tokens that end an answer.
    """

    model: str
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    scores: tuple[float, ...]
    merges: tuple[tuple[str, str], ...]
    pre: Pretokenizer | None
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None
    pad_id: int | None
    stop_ids: tuple[int, ...]
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    strip_after_special: bool
    chat_template: str | None


def read_vocabulary(header: GGUFHeader, metadata: Metadata) -> Vocabulary:
    """The vocabulary of a GGUF file.

    Raises:
        UnsupportedModel: Another kind of tokenizer, or an unknown pre-tokenizer.
        CheckpointError: Lists that are missing or do not fit together.
    """
    model = metadata.text("tokenizer.ggml.model")
    if model not in MODELS:
        raise UnsupportedModel(
            f"tokenizer {model[:40]!r} of this GGUF file is not rebuilt; known: "
            f"{', '.join(MODELS)}. Use the original model's tokenizer instead"
        )
    spm = model == "llama"
    tokens = _tokens(header)
    size = len(tokens)
    types = _types(header, tokens)
    scores = _scores(header, size) if spm else ()
    pre = None if spm else pretokenizer(metadata.text("tokenizer.ggml.pre", "default"))
    ids = {
        role: metadata.token_id(f"tokenizer.ggml.{role}_token_id", size)
        for role in ("bos", "eos", "eot", "eom", "unknown", "padding")
    }
    if spm:
        defaults = {"bos": 1, "eos": 2, "unknown": 0}
        ids |= {role: i for role, i in defaults.items() if ids[role] is None and i < size}
    return Vocabulary(
        model=model,
        tokens=tokens,
        types=tuple(types),
        scores=scores,
        merges=() if spm else _merges(header, tokens),
        pre=pre,
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        unk_id=ids["unknown"],
        pad_id=ids["padding"],
        stop_ids=_stop_ids(ids, tokens),
        add_bos=metadata.flag("tokenizer.ggml.add_bos_token", spm or bool(pre and pre.add_bos)),
        add_eos=metadata.flag("tokenizer.ggml.add_eos_token", False),
        add_space_prefix=metadata.flag("tokenizer.ggml.add_space_prefix", spm),
        strip_after_special=_is_phi3(metadata),
        chat_template=_chat_template(metadata),
    )


def _tokens(header: GGUFHeader) -> tuple[str, ...]:
    """llama.cpp names an empty token ``[EMPTY_id]`` and lets no text occur twice."""
    tokens = tuple(
        token or f"[EMPTY_{i}]" for i, token in enumerate(header.strings("tokenizer.ggml.tokens"))
    )
    if not tokens or len(set(tokens)) != len(tokens):
        raise CheckpointError("the tokens of this GGUF file are missing, or occur twice")
    return tokens


def _types(header: GGUFHeader, tokens: tuple[str, ...]) -> list[int]:
    """The type of each token; without the list, all are ``NORMAL``."""
    key, types = "tokenizer.ggml.token_type", [NORMAL] * len(tokens)
    if key in header.metadata:
        types = header.integers(key)[: len(tokens)]
    if len(types) != len(tokens):
        raise CheckpointError(f"{key} has {len(types)} entries for {len(tokens)} tokens")
    return [
        CONTROL if text in END_OF_TURN else kind for text, kind in zip(tokens, types, strict=True)
    ]


def _scores(header: GGUFHeader, size: int) -> tuple[float, ...]:
    scores = header.floats("tokenizer.ggml.scores")
    if len(scores) < size or any(score != score for score in scores):
        raise CheckpointError(f"tokenizer.ggml.scores has no number for each of {size} tokens")
    return tuple(scores[:size])


def _merges(header: GGUFHeader, tokens: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Pairs in order of rank; the first space after the first character parts them."""
    known, pairs = set(tokens), []
    for merge in header.strings("tokenizer.ggml.merges"):
        place = merge.find(" ", 1)
        left, right = merge[:place], merge[place + 1 :]
        if place < 0 or left not in known or right not in known or left + right not in known:
            raise CheckpointError(f"merge {merge[:40]!r} of this GGUF file is not of its tokens")
        pairs.append((left, right))
    return tuple(pairs)


def _stop_ids(ids: dict[str, int | None], tokens: tuple[str, ...]) -> tuple[int, ...]:
    stop = [ids[role] for role in ("eos", "eot", "eom")]
    stop += [i for i, text in enumerate(tokens) if text in END_OF_TURN]
    return tuple(dict.fromkeys(i for i in stop if i is not None))


def _is_phi3(metadata: Metadata) -> bool:
    """Phi-3's special tokens swallow the white space after them; only its name tells."""
    name = metadata.text("general.name", "").lower()
    return "phi-3" in name or "phi3" in name


def _chat_template(metadata: Metadata) -> str | None:
    """The template as text; it is rendered elsewhere, in a sandbox."""
    template = metadata.text("tokenizer.chat_template", "")
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise CheckpointError(
            f"the chat template has {len(template):,} characters; "
            f"at most {MAX_TEMPLATE_CHARACTERS:,} are read"
        )
    return template or None
