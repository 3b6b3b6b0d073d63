"""``tokenizer.json`` and its companions for a vocabulary read from a GGUF file.

The format is that of the ``tokenizers`` package (0.23.3). Special tokens are matched in any text
that is encoded, as the tokenizers of those models do on the hub; to encode a user's text so that
none of it becomes a control token, set ``encode_special_tokens`` of the ``tokenizers.Tokenizer``
(``split_special_tokens=True`` in transformers).
"""

import json
from pathlib import Path
from typing import Any

from uma.errors import CheckpointError
from uma.runtime.gguf.vocabulary import (
    BYTE,
    CONTROL,
    UNKNOWN,
    USER_DEFINED,
    Vocabulary,
)

SPACE = "▁"
"""SentencePiece writes a space as U+2581."""


def tokenizer_json(vocabulary: Vocabulary) -> dict[str, Any]:
    """The content of ``tokenizer.json``."""
    spm = vocabulary.pre is None
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary),
        "normalizer": _spm_normalizer(vocabulary) if spm else None,
        "pre_tokenizer": None if spm else _split(vocabulary),
        "post_processor": _post_processor(vocabulary),
        "decoder": _spm_decoder(vocabulary) if spm else _byte_level(),
        "model": _model(vocabulary),
    }


def _added_tokens(vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """Tokens that are cut out of the text before anything else, whole."""
    kinds = (CONTROL, USER_DEFINED, UNKNOWN)
    return [
        {
            "id": i,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": _strips(vocabulary, text),
            "normalized": False,
            "special": vocabulary.types[i] != USER_DEFINED,
        }
        for i, text in enumerate(vocabulary.tokens)
        if vocabulary.types[i] in kinds
    ]


def _strips(vocabulary: Vocabulary, text: str) -> bool:
    """llama.cpp's rule for Phi-3 (``llama-vocab.cpp``, per token attributes)."""
    return vocabulary.strip_after_special and text not in ("<unk>", "<s>", "<|endoftext|>")


def _split(vocabulary: Vocabulary) -> dict[str, Any]:
    assert vocabulary.pre is not None
    splits: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False}
        for p in vocabulary.pre.patterns
    ]
    return {"type": "Sequence", "pretokenizers": [*splits, _byte_level()]}


def _byte_level() -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }


def _spm_normalizer(vocabulary: Vocabulary) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    ]
    if vocabulary.add_space_prefix:
        steps.insert(0, {"type": "Prepend", "prepend": SPACE})
    return {"type": "Sequence", "normalizers": steps}


def _spm_decoder(vocabulary: Vocabulary) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if vocabulary.add_space_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _post_processor(vocabulary: Vocabulary) -> dict[str, Any] | None:
    """Puts BOS and EOS around a text where the vocabulary says so."""
    sides = []
    for wanted, i in (
        (vocabulary.add_bos, vocabulary.bos_id),
        (vocabulary.add_eos, vocabulary.eos_id),
    ):
        sides.append(vocabulary.tokens[i] if wanted and i is not None else None)
    if not any(sides):
        return None
    bos, eos = ([{"SpecialToken": {"id": side, "type_id": 0}}] if side else [] for side in sides)
    ids = {text: i for i, text in enumerate(vocabulary.tokens) if text in sides}
    return {
        "type": "TemplateProcessing",
        "single": [*bos, {"Sequence": {"id": "A", "type_id": 0}}, *eos],
        "pair": [
            *bos,
            {"Sequence": {"id": "A", "type_id": 0}},
            *eos,
            *bos,
            {"Sequence": {"id": "B", "type_id": 0}},
            *eos,
        ],
        "special_tokens": {
            text: {"id": text, "ids": [i], "tokens": [text]} for text, i in ids.items()
        },
    }


def _model(vocabulary: Vocabulary) -> dict[str, Any]:
    spm = vocabulary.pre is None
    unknown = (
        vocabulary.tokens[vocabulary.unk_id] if spm and vocabulary.unk_id is not None else None
    )
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": spm,
        "byte_fallback": spm,
        "ignore_merges": vocabulary.pre is not None and vocabulary.pre.ignore_merges,
        "vocab": {text: i for i, text in enumerate(vocabulary.tokens)},
        "merges": spm_merges(vocabulary) if spm else vocabulary.merges,
    }


def spm_merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Pairs of tokens whose union is a token, the best score first.

    SentencePiece joins the pair whose union scores highest (llama.cpp,
    ``llm_tokenizer_spm_session``), which is BPE with one rank for each union.
    """
    ids = {text: i for i, text in enumerate(vocabulary.tokens)}
    pairs = []
    for text, i in ids.items():
        if vocabulary.types[i] == BYTE:
            continue
        for place in range(1, len(text)):
            left, right = text[:place], text[place:]
            if left in ids and right in ids:
                pairs.append((-vocabulary.scores[i], i, place, left, right))
    pairs.sort()
    return [(left, right) for *_, left, right in pairs]


def tokenizer_config(vocabulary: Vocabulary, max_length: int) -> dict[str, Any]:
    """The content of ``tokenizer_config.json``."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": vocabulary.add_bos,
        "add_eos_token": vocabulary.add_eos,
        **special_tokens(vocabulary),
    }


def special_tokens(vocabulary: Vocabulary) -> dict[str, str]:
    """The content of ``special_tokens_map.json``: the text of the tokens with a role."""
    ids = {
        "bos_token": vocabulary.bos_id,
        "eos_token": vocabulary.eos_id,
        "unk_token": vocabulary.unk_id,
        "pad_token": vocabulary.pad_id,
    }
    return {role: vocabulary.tokens[i] for role, i in ids.items() if i is not None}


def write_tokenizer(vocabulary: Vocabulary, folder: Path, max_length: int) -> None:
    """Write the files of the tokenizer into ``folder``.

    Raises:
        CheckpointError: The ``tokenizers`` package refuses the result.
    """
    from tokenizers import Tokenizer

    text = json.dumps(tokenizer_json(vocabulary), ensure_ascii=False)
    try:
        Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises plain Exception
        raise CheckpointError(f"the tokenizer of this GGUF file is broken: {error}") from None
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    for name, fields in {
        "tokenizer_config.json": tokenizer_config(vocabulary, max_length),
        "special_tokens_map.json": special_tokens(vocabulary),
    }.items():
        (folder / name).write_text(json.dumps(fields, indent=2), encoding="utf-8")
    if vocabulary.chat_template is not None:
        (folder / "chat_template.jinja").write_text(vocabulary.chat_template, encoding="utf-8")
