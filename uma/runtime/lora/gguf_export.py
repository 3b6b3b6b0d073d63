"""A fused model as a GGUF file through mlx_lm.gguf, where that gives a right one.

mlx-lm 0.32.2 (``gguf.py``) writes float weights under Llama's names, the dimensions of the rotary
embedding as width over heads, no scaling of it but the linear one, and a SentencePiece vocabulary
whose scores are all equal. What that makes wrong is refused here; the vocabulary is made right.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import gguf

from uma.errors import StorageError, UnsupportedModel
from uma.runtime.lora.adapter import reason, sync
from uma.units import format_gib

MODEL_TYPES = ("llama", "mistral")
_LARGEST = 65504  # float16
_INSTEAD = "fuse with --dequantize and give the folder to llama.cpp's convert_hf_to_gguf.py instead"


def require_exportable(folder: Path, config: Mapping[str, Any], size_bytes: int) -> None:
    """Refuse before anything is loaded what mlx-lm cannot write; ``size_bytes`` in 16 bits.

    Raises:
        UnsupportedModel: With the reason, and what it would take otherwise.
    """
    reason = next(_reasons(folder, config), None)
    if reason is not None:
        disk, memory = format_gib(2 * size_bytes), format_gib(size_bytes)
        raise UnsupportedModel(
            f"mlx_lm.gguf cannot write this model: {reason}; {_INSTEAD} (it takes {disk} of disk "
            f"for folder and GGUF file, and about {memory} of memory)"
        )


def require_dense(config: Mapping[str, Any], dequantize: bool, size_bytes: int) -> None:
    """Refuse a quantized fusion.

    Raises:
        UnsupportedModel: With what the dequantized one takes.
    """
    if "quantization" in config and not dequantize:
        raise UnsupportedModel(
            "GGUF is written of 16-bit weights: add --dequantize, which takes "
            f"{format_gib(2 * size_bytes)} of disk for folder and GGUF file, and "
            f"{format_gib(2 * size_bytes)} of memory while it is written"
        )


def _reasons(folder: Path, config: Mapping[str, Any]) -> Iterator[str]:
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        yield f"it knows {' and '.join(MODEL_TYPES)}, and not {kind}"
    scaling = config.get("rope_scaling") or {}
    name = scaling.get("type") or scaling.get("rope_type")
    if name not in (None, "default", "linear") or (name == "linear" and "type" not in scaling):
        yield f"it does not write the rope scaling {name!r}"
    heads = config.get("num_attention_heads") or 1
    if config.get("head_dim") not in (None, (config.get("hidden_size") or 0) // heads):
        yield "its heads are not as wide as the model divided by their number"
    if config.get("attention_bias") or config.get("mlp_bias"):
        yield "it does not write biases in order"
    if not _is_sentencepiece(folder):
        yield "it writes every vocabulary as SentencePiece's, and this one is not"


def _is_sentencepiece(folder: Path) -> bool:
    """BPE with bytes as a fallback, which is how a SentencePiece model of Llama's kind is kept."""
    found = _tokenizer(folder)["model"]
    return found.get("type") == "BPE" and bool(found.get("byte_fallback"))


def _tokenizer(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    return found


class _Vocabulary(gguf.HfVocab):  # type: ignore[misc]
    """mlx-lm's, with scores: pieces that are merged earlier score higher, as in SentencePiece."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        found = _tokenizer(folder)
        merges = found["model"]["merges"]
        self._added = {t["id"]: bool(t["special"]) for t in found.get("added_tokens") or ()}
        pieces = ["".join(m) if isinstance(m, list) else m.replace(" ", "", 1) for m in merges]
        self._ranks = {piece: rank for rank, piece in reversed(list(enumerate(pieces)))}
        self._names = {n: piece for piece, n in self.tokenizer.get_vocab().items()}

    def get_token_score(self, token_id: int) -> float:
        return -float(self._ranks.get(self._names[token_id], len(self._ranks)))

    def get_token_type(self, token_id: int, token_text: Any, special_ids: Any) -> Any:
        """mlx-lm takes an added token for one only if its id is beyond the vocabulary."""
        if token_id == self.tokenizer.unk_token_id:
            return gguf.TokenType.UNKNOWN
        if token_id in self._added:
            kinds = gguf.TokenType
            return kinds.CONTROL if self._added[token_id] else kinds.USER_DEFINED
        return super().get_token_type(token_id, token_text, special_ids)


def export_gguf(folder: Path, out: Path) -> int:
    """Write the model of a fused ``folder`` to ``out``, whole or not at all; its bytes.

    Raises:
        UnsupportedModel: If a weight is beyond float16.
        StorageError: If the file exists or cannot be written.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights: dict[str, Any] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        found: Any = mx.load(str(file))
        weights |= found
    for name, value in weights.items():
        largest: Any = mx.abs(value).max().item() if value.dtype == mx.bfloat16 else 0
        if largest > _LARGEST:
            raise UnsupportedModel(f"{name} holds numbers beyond float16; {_INSTEAD}")
    if os.path.lexists(out):
        raise StorageError(f"{out} exists; it is not written over")
    partial = out.with_name(f".{out.stem}.partial.gguf")
    try:
        mx.save_gguf(str(partial), _arrays(weights, config), _metadata(folder, config))
        sync(partial)
        os.replace(partial, out)
    except (OSError, RuntimeError) as error:
        why = reason(error, out.absolute().parent)
        partial.unlink(missing_ok=True)
        raise StorageError(f"{out} cannot be written: {why}") from error
    return out.stat().st_size


def _metadata(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """mlx-lm's, its token types signed: llama.cpp b11434 refuses a file that has them unsigned."""
    found: dict[str, Any] = gguf.prepare_metadata(config, _Vocabulary(folder))
    kind = "tokenizer.ggml.token_type"
    return found | {kind: found[kind].astype(mx.int32)}


def _arrays(weights: Mapping[str, mx.array], config: Mapping[str, Any]) -> dict[str, mx.array]:
    """As ``convert_to_gguf`` orders, names and casts them; heads as llama.cpp rotates them."""
    heads = config["num_attention_heads"]
    few = config.get("num_key_value_heads") or heads
    found = {}
    for name, value in weights.items():
        if "self_attn.q_proj.weight" in name:
            value = gguf.permute_weights(value, heads, heads)
        elif "self_attn.k_proj.weight" in name:
            value = gguf.permute_weights(value, heads, few)
        if "norm" in name:
            value = value.astype(mx.float32)
        elif value.dtype == mx.bfloat16:
            value = value.astype(mx.float16)
        found[gguf.translate_weight_names(name)] = value
    return found
