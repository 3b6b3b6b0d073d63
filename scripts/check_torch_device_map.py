#!/usr/bin/env python3
"""Record accelerate's own device maps of meta models, and run a tiny model with one from here.

Usage: check_torch_device_map.py FILE.json  (in an environment with torch, transformers, accelerate)

Each model is built on the meta device from its configuration in the catalog, and placed by
``accelerate.infer_auto_device_map`` for several limits. ``tests/data/device_maps.json`` is what
this wrote, with versions; ``tests/test_emit.py`` compares ``uma.plan.emit.device_map`` with it.
A tiny Llama then runs with the map that we give it, parts of it on disk, and must answer as it
does without.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from accelerate import init_empty_weights

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

MODELS = {
    "meta-llama__Meta-Llama-3-8B-Instruct": transformers.LlamaForCausalLM,
    "meta-llama__Meta-Llama-3-70B-Instruct": transformers.LlamaForCausalLM,
    "Qwen__Qwen3-30B-A3B": transformers.Qwen3MoeForCausalLM,
    "google__gemma-3-27b-it": transformers.Gemma3ForCausalLM,
    "google__gemma-3-1b-it": transformers.Gemma3ForCausalLM,
}
GIB = 1 << 30
LIMITS: list[dict[str, int]] = [
    {"0": 24 * GIB, "cpu": 64 * GIB},
    {"0": 8 * GIB, "cpu": 4 * GIB},
    {"0": 12 * GIB, "1": 24 * GIB, "cpu": 16 * GIB},
    {"0": 80 * GIB, "1": 80 * GIB, "2": 80 * GIB, "cpu": 256 * GIB},
    {"0": 2 * GIB, "cpu": 2 * GIB},
    {"0": 1 * GIB, "1": 1 * GIB, "cpu": 20 * GIB},
    {"cpu": 10 * GIB},
]
TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def configuration(name: str, model: Any) -> Any:
    """The text part of a configuration of the catalog."""
    values = json.loads((ROOT / "uma/data/models" / f"{name}.json").read_text())
    values = values.get("text_config", values)
    kept = {k: v for k, v in values.items() if k[0] != "_" and k not in ("quantization_config",)}
    kept.pop("model_type", None)
    return model.config_class(**kept)


def recorded() -> dict[str, Any]:
    # It leaves out cards that are not in this machine: the limits are taken as they are.
    accelerate.utils.modeling.get_max_memory = lambda limits: limits
    maps = []
    for name, model_class in MODELS.items():
        with init_empty_weights():
            model = model_class(configuration(name, model_class))
        model.tie_weights()
        for limits in LIMITS:
            rooms = {int(k) if k.isdigit() else k: v for k, v in limits.items()}
            found = accelerate.infer_auto_device_map(
                model,
                max_memory=dict(rooms),
                no_split_module_classes=list(model._no_split_modules),
                dtype=torch.bfloat16,
            )
            maps.append({"model": name, "limits": limits, "device_map": dict(found)})
    versions = {
        "accelerate": accelerate.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return {"versions": versions, "maps": maps}


def run_tiny() -> dict[str, Any]:
    """A model with the map of ``auto_device_map``, two layers in memory and the rest on disk."""
    from uma.architecture import architecture_from_config
    from uma.plan.emit.device_map import auto_device_map, modules_of

    modules = modules_of(architecture_from_config(TINY), 4)
    layer = modules[0].children[1].children[0].size_bytes
    embeddings = modules[0].children[0].size_bytes
    rooms = {"cpu": embeddings * 2 + 3 * layer}
    device_map = auto_device_map(modules, rooms)
    config = transformers.LlamaConfig(**{k: v for k, v in TINY.items() if k != "model_type"})
    torch.manual_seed(0)
    whole = transformers.LlamaForCausalLM(config).eval()
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        whole.save_pretrained(folder)
        expected = whole(tokens).logits
        parts = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            device_map=device_map,
            max_memory=rooms,
            offload_folder=f"{folder}/offload",
        )
        found = parts(tokens).logits
    error = float((found - expected).abs().max())
    assert error < 1e-5, error
    assert "disk" in set(device_map.values()), device_map
    return {"device_map": device_map, "max_abs_error": error}


if __name__ == "__main__":
    document = recorded()
    document["tiny"] = run_tiny()
    Path(sys.argv[1]).write_text(json.dumps(document, indent=1) + "\n")
    print(f"{len(document['maps'])} maps; tiny model: {document['tiny']}")
