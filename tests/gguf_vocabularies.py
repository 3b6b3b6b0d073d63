"""Small vocabularies as GGUF files: tests/data/tiny_vocabularies.json with any pre-tokenizer.

The merges of the BPE vocabulary cross words, digits, signs and spaces, so that a boundary that a
pre-tokenizer sets shows in the token ids. The SentencePiece one has byte fallback. Both were
trained on tokenizer_strings.json (tokenizers 0.23.3, sentencepiece 0.2.3).
"""

import json
from pathlib import Path

import gguf

DATA = Path(__file__).parent / "data"


def write_vocabulary(path: Path, kind: str, pre: str = "default", **keys: object) -> None:
    """A GGUF file without tensors. ``keys`` are written as they are, under tokenizer.ggml."""
    vocabulary = json.loads((DATA / "tiny_vocabularies.json").read_text())[kind]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_head_count(1)
    writer.add_feed_forward_length(32)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_name(str(keys.pop("name", "tiny")))
    writer.add_token_list(vocabulary["tokens"])
    writer.add_token_types(vocabulary["types"])
    if kind == "bpe":
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges(vocabulary["merges"])
        writer.add_bos_token_id(vocabulary["tokens"].index("<|endoftext|>"))
        writer.add_eos_token_id(vocabulary["tokens"].index("<|im_end|>"))
    else:
        writer.add_tokenizer_model("llama")
        writer.add_token_scores(vocabulary["scores"])
    for key, value in keys.items():
        add = writer.add_bool if isinstance(value, bool) else writer.add_uint32
        add(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
