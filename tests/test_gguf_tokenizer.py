"""Tokenizers rebuilt from GGUF, against token ids of llama.cpp's own tokenizer.

tests/data/tokenizer_golden.json.gz holds what llama.cpp b11434 answers for each of the strings in
tokenizer_strings.json, with every pre-tokenizer that we know.
"""

import gzip
import json
from pathlib import Path

import gguf
import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

from gguf_models import add_vocabulary
from gguf_vocabularies import DATA, write_vocabulary
from tokenizers import Tokenizer

from uma.checkpoint.gguf import read_header
from uma.errors import CheckpointError, UnsupportedModel
from uma.runtime.gguf.metadata import Metadata
from uma.runtime.gguf.pretokenizers import known_names, pretokenizer
from uma.runtime.gguf.tokenizer import tokenizer_json, write_tokenizer
from uma.runtime.gguf.vocabulary import Vocabulary, read_vocabulary

STRINGS: list[str] = json.loads((DATA / "tokenizer_strings.json").read_text())
GOLDEN = json.loads(gzip.decompress((DATA / "tokenizer_golden.json.gz").read_bytes()))["cases"]
FIRST = {
    case["kind"]: case["special"] for case in reversed(GOLDEN) if isinstance(case["special"], list)
}


def vocabulary(path: Path) -> Vocabulary:
    header = read_header(path)
    return read_vocabulary(header, Metadata(header.metadata))


def golden_ids(case: dict, index: int, special: bool) -> list[int]:
    """What llama.cpp gave for string ``index``; see "reading" in the file."""
    parsed = case["special"]
    found = parsed[index] if isinstance(parsed, list) else parsed.get(str(index))
    ids = FIRST[case["kind"]][index] if found is None else found
    return ids if special else case["plain"].get(str(index), ids)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: f"{c['kind']}-{c['pre']}-{len(c['keys'])}")
def test_token_ids_are_those_of_llama_cpp(case: dict, tmp_path: Path) -> None:
    write_vocabulary(tmp_path / "v.gguf", case["kind"], case["pre"], **case["keys"])
    tokenizer = Tokenizer.from_str(json.dumps(tokenizer_json(vocabulary(tmp_path / "v.gguf"))))
    for special in (True, False):
        tokenizer.encode_special_tokens = not special
        for index, text in enumerate(STRINGS):
            if not any(part in text for part in case["skip"]):
                ids = tokenizer.encode(text).ids
                assert ids == golden_ids(case, index, special), (text, special)


def test_every_pre_tokenizer_splits_as_one_that_was_compared() -> None:
    compared = {pretokenizer(case["pre"]) for case in GOLDEN if case["kind"] == "bpe"}
    assert len(STRINGS) > 600
    assert {pretokenizer(name) for name in known_names()} == compared


def test_an_unknown_pre_tokenizer_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedModel, match=r"'kimi-k2'.*llama-bpe.*smollm"):
        pretokenizer("kimi-k2")


@pytest.mark.parametrize("kind", ["bpe", "spm"])
def test_text_survives_encoding_and_decoding(kind: str, tmp_path: Path) -> None:
    write_vocabulary(tmp_path / "v.gguf", kind)
    tokenizer = Tokenizer.from_str(json.dumps(tokenizer_json(vocabulary(tmp_path / "v.gguf"))))
    tokenizer.encode_special_tokens = True
    for text in STRINGS:
        if kind == "spm" and any(part in text for part in ("▁", "   ", "tool>")):
            continue  # its own sign for a space; a space is put after a user-defined token
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("kind", ["bpe", "spm"])
def test_mlx_lm_loads_the_files_and_streams_text_with_its_fast_detokenizer(
    kind: str, tmp_path: Path
) -> None:
    from mlx_lm import tokenizer_utils

    write_vocabulary(tmp_path / "v.gguf", kind, "smollm")
    found = vocabulary(tmp_path / "v.gguf")
    folder = tmp_path / "folder"
    folder.mkdir()
    write_tokenizer(found, folder, 64)
    wrapper = tokenizer_utils.load(folder)
    text = "Hello, wörld! 123 <|im_end|>"
    ids = wrapper.encode(text, add_special_tokens=False)
    assert found.tokens[ids[-1]] == "<|im_end|>"
    assert wrapper.encode(text, split_special_tokens=True)[-1] != ids[-1]
    detokenizer = wrapper.detokenizer
    for i in ids:
        detokenizer.add_token(i)
    detokenizer.finalize()
    assert detokenizer.text == text
    name = type(detokenizer).__name__
    assert name == {"bpe": "BPEStreamingDetokenizer", "spm": "SPMStreamingDetokenizer"}[kind]
    assert wrapper.eos_token_id == found.eos_id
    assert wrapper.bos_token_id == found.bos_id
    assert wrapper.model_max_length == 64


def test_the_chat_template_is_kept_as_text(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    writer = gguf.GGUFWriter(tmp_path / "v.gguf", "llama")
    add_vocabulary(writer)
    _close(writer)
    found = vocabulary(tmp_path / "v.gguf")
    folder = tmp_path / "folder"
    folder.mkdir()
    write_tokenizer(found, folder, 64)
    assert (folder / "chat_template.jinja").read_text() == "{{ messages[0]['content'] }}"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "he"}], tokenize=False)
    assert (text, tokenizer.encode(text)) == ("he", [256])


def test_tokens_that_end_an_answer_stop_it_whatever_their_type(tmp_path: Path) -> None:
    """llama.cpp b11434, llama-vocab.cpp: texts of ``special_eog_ids`` become control tokens."""
    tokens = ["a", "aa", "<|im_end|>", "<end_of_turn>", "</s>"]
    found = _small(tmp_path, tokens, [1, 1, 1, 4, 1])
    assert found.stop_ids == (2, 3)
    assert found.types == (1, 1, 3, 3, 1)


def _small(tmp_path: Path, tokens: list[str], types: list[int], merges=(), **keys) -> Vocabulary:
    writer = gguf.GGUFWriter(tmp_path / "v.gguf", "llama")
    writer.add_tokenizer_model(keys.pop("model", "gpt2"))
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if merges is not None:
        writer.add_token_merges(merges or ["a a"])
    for key, value in keys.items():
        writer.add_key_value(f"tokenizer.ggml.{key}", *value)
    _close(writer)
    return vocabulary(tmp_path / "v.gguf")


def _close(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


INTEGER, STRING = gguf.GGUFValueType.INT32, gguf.GGUFValueType.STRING


@pytest.mark.parametrize(
    ("tokens", "types", "merges", "keys"),
    [
        (["a", "a"], [1, 1], (), {}),
        (["a", "aa"], [1], (), {}),
        (["a", "aa"], [1, 1], ["a b"], {}),
        (["a", "aa"], [1, 1], ["aa"], {}),
        (["a", "b"], [1, 1], ["a b"], {}),
        (["a", "aa"], [1, 1], None, {}),
        (["a", "aa"], [1, 1], (), {"eos_token_id": (-1, INTEGER)}),
        (["a", "aa"], [1, 1], (), {"eos_token_id": ("1", STRING)}),
        (["a", "aa"], [1, 1], (), {"add_bos_token": (1, INTEGER)}),
        (["a", "aa"], [1, 1], None, {"model": "llama"}),
    ],
)
def test_a_vocabulary_that_does_not_fit_together_is_refused(
    tmp_path: Path, tokens: list[str], types: list[int], merges, keys: dict
) -> None:
    with pytest.raises(CheckpointError):
        _small(tmp_path, tokens, types, merges, **keys)


def test_a_token_id_outside_the_vocabulary_is_ignored(tmp_path: Path) -> None:
    found = _small(tmp_path, ["a", "aa"], [1, 1], eos_token_id=(7, INTEGER))
    assert (found.eos_id, found.stop_ids) == (None, ())


def test_other_kinds_of_tokenizer_are_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"'t5'.*gpt2, llama"):
        _small(tmp_path, ["a"], [1], model="t5")


def test_an_enormous_chat_template_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "v.gguf", "llama")
    add_vocabulary(writer)
    writer.kv_data[0].pop("tokenizer.chat_template")
    writer.add_chat_template("x" * (1 << 21))
    _close(writer)
    with pytest.raises(CheckpointError, match="chat template"):
        vocabulary(tmp_path / "v.gguf")
