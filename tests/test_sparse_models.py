"""Sparse files of published models: headers and holes, against three witnesses.

The published parameter counts and sizes; ``llama-fit-params`` of llama.cpp b11434, whose answers
are in tests/data/llama_fit_params.csv (``scripts/record_llama_cpp.py``); mlx-lm's cache objects.
"""

import csv
import json
import re
from math import prod
from pathlib import Path
from typing import Any

import gguf_sparse
import pytest
import sparse_models
from published import architecture_of, config_of

from uma.architecture import architecture_from_config
from uma.architecture.layers import Architecture, parameters
from uma.checkpoint.safetensors import headers_of_folder
from uma.checkpoint.source import locate
from uma.cli import main
from uma.engines import llama_cpp
from uma.engines.mlx_cache import layer_caches
from uma.memory.kv_cache import StateCache, cache_bytes, calls, state_bytes
from uma.units import GIB, MIB
from uma.workload import Inference

TESTS = Path(__file__).parent
CONFIGS = TESTS.parent / "uma/data/models"
CACHED = [*sparse_models.PUBLISHED, "qwen3-next-80b-a3b"]


def fit_params() -> list[dict[str, str]]:
    with (TESTS / "data/llama_fit_params.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sparse")
    for name in sparse_models.PUBLISHED:
        sparse_models.write(root / name, config_of(name))
    return {name: root / name for name in sparse_models.PUBLISHED}


@pytest.mark.parametrize("name", sparse_models.PUBLISHED)
def test_headers_have_the_published_parameters_and_bytes(
    name: str, folders: dict[str, Path]
) -> None:
    published, gib = sparse_models.PUBLISHED[name]
    source = locate(str(folders[name]))
    tensors = [tensor for header in source.headers for tensor in header.tensors]
    assert sum(prod(tensor.shape) for tensor in tensors) == published
    assert (source.weight_bytes or 0) / GIB == pytest.approx(gib, abs=0.006)


@pytest.mark.parametrize("name", sparse_models.PUBLISHED)
def test_the_architecture_has_the_parameters_of_the_published_decoder(
    name: str, folders: dict[str, Path]
) -> None:
    """All tensors but scales, the vision tower, and layers for multi-token prediction."""
    architecture = architecture_of(name)
    ours = architecture.num_parameters + (architecture.mtp_parameters or 0)
    left_out = re.compile(r"^(vision_tower|multi_modal_projector)\.|_scale_inv$")
    theirs = sum(
        prod(tensor.shape)
        for header in headers_of_folder(folders[name])
        for tensor in header.tensors
        if not left_out.search(tensor.name)
    )
    assert ours == theirs


def test_a_folder_is_estimated_from_its_headers(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--engine", "mlx", "--bits", "16", "--json"]
    main(["estimate", str(folders["llama-3-8b"]), *options])
    (weights,) = (t for t in json.loads(capsys.readouterr().out)["terms"] if t["name"] == "weights")
    if weights["source"] == "safetensors headers":
        assert weights["size_bytes"] == 2 * sparse_models.PUBLISHED["llama-3-8b"][0]
    else:  # a machine without Metal holds 16-bit weights in float32
        assert weights["size_bytes"] == 4 * sparse_models.PUBLISHED["llama-3-8b"][0]


def settings_of(options: str) -> tuple[int, llama_cpp.LlamaCpp]:
    """Context and settings of a recorded command line, everything on the host."""
    flags = options.split()
    values = dict(zip(flags[::2], flags[1::2], strict=False))
    settings = llama_cpp.LlamaCpp(
        n_ubatch=int(values.get("-ub", 512)),
        cache_type_k=values.get("-ctk", "f16"),
        cache_type_v=values.get("-ctv", "f16"),
        swa_full="--swa-full" in flags,
        n_gpu_layers=0,
    )
    return int(values["-c"]), settings


@pytest.mark.parametrize("row", fit_params(), ids=lambda row: f"{row['model']} {row['options']}")
def test_weights_and_cache_equal_llama_fit_params_to_the_mib_and_compute_within_a_tenth(
    row: dict[str, str],
) -> None:
    config = json.loads((CONFIGS / f"{row['model']}.json").read_text(encoding="utf-8"))
    architecture = architecture_from_config(config)
    context, settings = settings_of(row["options"])
    weights = llama_cpp.weights_term(architecture, row["quant"])
    terms = llama_cpp.inference_terms(architecture, weights, Inference(context), settings)
    sizes = {term.name: term.size_bytes for term in terms}
    assert sizes["weights"] // MIB == int(row["model_mib"])
    assert sizes["kv_cache"] // MIB == int(row["context_mib"])
    assert sizes["activations"] / MIB == pytest.approx(int(row["compute_mib"]), rel=0.1)


FAMILIES = {
    "meta-llama__Meta-Llama-3-8B-Instruct": "llama",
    "meta-llama__Meta-Llama-3-70B-Instruct": "llama",
    "Qwen__Qwen3-30B-A3B": "qwen3moe",
    "google__gemma-3-27b-it": "gemma3",
}


@pytest.mark.parametrize(
    "row",
    [row for row in fit_params() if row["model"] in FAMILIES],
    ids=lambda row: f"{row['model']} {row['options']}",
)
def test_a_gguf_file_is_estimated_as_llama_fit_params_does(
    row: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file itself, by llama.cpp's own options, of families that are read from GGUF here."""
    pytest.importorskip("gguf")
    config = json.loads((CONFIGS / f"{row['model']}.json").read_text(encoding="utf-8"))
    path = tmp_path / "model.gguf"
    gguf_sparse.write(
        path, FAMILIES[row["model"]], architecture_from_config(config), config, row["quant"]
    )
    main(["estimate", str(path), "--engine", "llama.cpp", *row["options"].split(), "--json"])
    terms = json.loads(capsys.readouterr().out)["terms"]
    sizes = {term["name"]: term["size_bytes"] for term in terms}
    assert sizes["weights"] // MIB == int(row["model_mib"])
    assert sizes["kv_cache"] // MIB == int(row["context_mib"])


def fed(architecture: Architecture, config: dict[str, Any], tokens: int, step: int) -> list[int]:
    """Bytes of mlx-lm's caches after each call over a prompt, none of it evaluated."""
    mx = pytest.importorskip("mlx.core")
    pytest.importorskip("mlx_lm")
    from mlx_lm.models.cache import make_prompt_cache
    from oracle.build import build

    from uma.runtime.trace_model import completed

    caches = make_prompt_cache(build(completed(config)))
    ours = {layer.layer: layer.caches for layer in layer_caches(architecture)}
    assert len(caches) == len(ours)
    sizes = []
    for length in calls(tokens, step):
        total = 0
        for cache_, (kind,) in zip(caches, ours.values(), strict=True):
            if not isinstance(kind, StateCache):
                keys, values = (mx.zeros((1, h, length, d), mx.bfloat16) for h, d in kind.widths)
                cache_.update_and_fetch(keys, values)
                total += cache_.nbytes
        sizes.append(total)
    return sizes


@pytest.mark.parametrize("name", CACHED)
@pytest.mark.parametrize("step", [512, 2048])
def test_caches_equal_those_of_mlx_lm_to_the_byte(name: str, step: int) -> None:
    architecture = architecture_of(name)
    sizes = fed(architecture, config_of(name), 8192, step)
    ours = cache_bytes(layer_caches(architecture), 8192, step)
    assert (ours.prefill_peak, ours.prefill_end) == (max(sizes), sizes[-1])


def test_the_states_of_qwen3_next_are_those_of_its_published_shapes() -> None:
    """36 layers: 3 x 8,192 of a convolution in bfloat16, 32 heads of 128 x 128 in float32."""
    held = state_bytes(layer_caches(architecture_of("qwen3-next-80b-a3b")))
    assert held == 36 * (2 * 3 * 8192 + 4 * 32 * 128 * 128)


def test_every_parameter_of_a_dense_model_is_a_tensor_of_its_files(
    folders: dict[str, Path],
) -> None:
    header = {
        tensor.name.removesuffix(".weight"): tensor.shape
        for one in headers_of_folder(folders["llama-3-8b"])
        for tensor in one.tensors
    }
    assert {p.name: p.shape for p in parameters(architecture_of("llama-3-8b"))} == header
