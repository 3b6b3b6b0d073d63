"""Adapters of PEFT imported and exported: equal logits with PEFT and PyTorch themselves.

``tests/data/peft`` holds what ``scripts/peft_golden.py`` made with torch 2.13.0 and peft 0.21.2.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import save_config
from models import CONFIGS, build_model
from peft_base import CONFIG, MLX, PEFT, TOKENS, factor, weights

from uma.cli import main
from uma.errors import CheckpointError, StorageError, UmaError, UnsupportedModel
from uma.runtime.lora.adapter import Adapter, put_adapter, save_adapter
from uma.runtime.lora.peft import from_peft
from uma.runtime.lora.peft_export import save_peft, to_peft

DATA = Path(__file__).parent / "data" / "peft"


def base() -> Any:
    model = build_model(CONFIG)
    model.load_weights([(name, mx.array(value)) for name, value in weights().items()])
    return model


def logits(model: Any) -> np.ndarray:
    model.eval()
    return np.array(model(mx.array([TOKENS]))[0])


def golden(name: str) -> np.ndarray:
    return np.array(json.loads((DATA / "logits.json").read_text())[name])


def own(name: str, folder: Path) -> Path:
    """An adapter of mlx-lm's, its arrays those of ``peft_base.factor``."""
    asked = Adapter(**MLX[name])
    trained = put_adapter(base(), asked)
    arrays = {k: mx.array(factor(k, np.array(v))) for k, v in trained.items()}
    save_adapter(folder, arrays, asked.config())
    return folder


def exported(name: str, folder: Path) -> None:
    """That adapter as PEFT's; ``scripts/peft_golden.py export`` keeps it."""
    source = own(name, folder.with_name(f".{name}"))
    save_peft(folder, *to_peft(source, base(), None))
    shutil.rmtree(source)


def test_the_base_is_the_same_in_both() -> None:
    assert np.abs(logits(base()) - golden("base")).max() < 1e-4


@pytest.mark.parametrize("name", list(PEFT))
def test_an_imported_adapter_gives_the_logits_of_peft(name: str, tmp_path: Path) -> None:
    """F4: square layers, ranks and alphas by pattern, rsLoRA, DoRA, embedding and head."""
    adapter, arrays = from_peft(DATA / name, base())
    save_adapter(tmp_path, arrays, adapter.config())
    found = logits(load_adapters(base(), str(tmp_path)))
    assert np.abs(found - golden(name)).max() < 2e-4
    assert np.abs(golden(name) - golden("base")).max() > 0.1


@pytest.mark.parametrize("name", list(MLX))
def test_peft_gives_the_logits_of_an_exported_adapter(name: str, tmp_path: Path) -> None:
    found = logits(load_adapters(base(), str(own(name, tmp_path / "own"))))
    assert np.abs(found - golden(f"exported_{name}")).max() < 2e-4
    assert np.abs(found - golden("base")).max() > 0.1
    exported(name, tmp_path / "new")
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        kept, made = (folder / file for folder in (DATA / f"exported_{name}", tmp_path / "new"))
        if file.endswith("json"):
            assert json.loads(kept.read_text()) == json.loads(made.read_text())
        else:
            one, other = mx.load(str(kept)), mx.load(str(made))
            assert one.keys() == other.keys()
            assert all(mx.array_equal(one[k], other[k]) for k in one)


def test_square_layers_transposed_would_give_other_logits(tmp_path: Path) -> None:
    """Why the logits are compared: every shape fits, and the numbers are wrong."""
    adapter, arrays = from_peft(DATA / "one_layer", base())
    swapped = {name: arrays[name[:-1] + ("b" if name.endswith("a") else "a")].T for name in arrays}
    save_adapter(tmp_path, swapped, adapter.config())
    found = logits(load_adapters(base(), str(tmp_path)))
    assert np.abs(found - golden("one_layer")).max() > 0.1


def test_import_and_export_give_the_first_adapter_back(tmp_path: Path) -> None:
    adapter, arrays = from_peft(DATA / "square", base())
    save_adapter(tmp_path, arrays, adapter.config())
    config, tensors = to_peft(tmp_path, base(), "org/model")
    kept = mx.load(str(DATA / "square" / "adapter_model.safetensors"))
    assert tensors.keys() == kept.keys()
    assert all(mx.array_equal(tensors[name], kept[name]) for name in kept)
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (4, 8, False)
    assert config["base_model_name_or_path"] == "org/model"


def test_an_export_into_a_folder_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"file/new: Not a directory$"):
        save_peft(tmp_path / "file" / "new", {}, {})


def changed(folder: Path, **settings: Any) -> Path:
    shutil.copytree(DATA / "one_layer", folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"peft_type": "IA3"}, "PEFT's IA3"),
        ({"peft_type": None}, "no peft_type"),
        ({"bias": "all"}, "bias='all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base too"),
        ({"some_new_thing": {"x": 1}}, "some_new_thing"),
        ({"use_dora": True}, "has not the factors"),
    ],
)
def test_what_mlx_lm_cannot_do_is_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(UmaError, match=text):
        from_peft(changed(tmp_path / "adapter", **settings), base())


def test_an_adapter_of_another_width_or_other_tensors_is_refused(tmp_path: Path) -> None:
    other = build_model(CONFIG | {"hidden_size": 64})
    with pytest.raises(CheckpointError, match=r"q_proj is \(32, 64\), not \(32, 32\)"):
        from_peft(DATA / "one_layer", other)
    folder = changed(tmp_path / "adapter")
    mx.save_safetensors(str(folder / "adapter_model.safetensors"), {"x": mx.zeros(1)})
    with pytest.raises(UnsupportedModel, match="x is no factor"):
        from_peft(folder, base())
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="can run code"):
        from_peft(folder, base())


def test_a_tied_embedding_and_experts_are_refused(tmp_path: Path) -> None:
    tied = CONFIG | {"tie_word_embeddings": True}
    with pytest.raises(UnsupportedModel, match="lm_head is no matrix"):
        from_peft(DATA / "embedding", build_model(tied))
    asked = Adapter(num_layers=1, rank=2, keys=("model.embed_tokens",))
    save_adapter(tmp_path, put_adapter(build_model(tied), asked), asked.config())
    with pytest.raises(UnsupportedModel, match="head too"):
        to_peft(tmp_path, build_model(tied), None)
    experts = build_model(CONFIGS["moe"])
    asked = Adapter(num_layers=1, rank=2)
    save_adapter(tmp_path, put_adapter(experts, asked), asked.config())
    with pytest.raises(UnsupportedModel, match="all experts in one array"):
        to_peft(tmp_path, build_model(CONFIGS["moe"]), None)


def test_a_quantized_base_takes_the_adapter_too(tmp_path: Path) -> None:
    model = base()
    nn.quantize(
        model, 32, 4, class_predicate=lambda path, _: path.endswith(("q_proj", "v_proj", "lm_head"))
    )
    adapter, arrays = from_peft(DATA / "embedding", model)
    assert adapter == from_peft(DATA / "embedding", base())[0]
    save_adapter(tmp_path, arrays, adapter.config())
    found = logits(load_adapters(model, str(tmp_path)))
    wanted = golden("embedding")
    assert np.linalg.norm(found - wanted) < 0.3 * np.linalg.norm(wanted - golden("base"))


def test_a_base_matrix_that_an_adapter_brings_must_be_the_model_s(tmp_path: Path) -> None:
    model = base()
    model.lm_head.weight = model.lm_head.weight[::-1]
    with pytest.raises(UnsupportedModel, match="brings its own lm_head"):
        from_peft(DATA / "embedding", model)


def test_the_commands_convert_there_and_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """V31: plain mlx-lm 0.32.2 fails on a PEFT adapter with ``no attribute 'num_layers'``."""
    from models import save_tokenizer

    folder = tmp_path / "model"
    folder.mkdir()
    base().save_weights(str(folder / "model.safetensors"))
    save_config(dict(CONFIG), folder / "config.json")
    save_tokenizer(folder)
    with pytest.raises(AttributeError, match="num_layers"):
        load_adapters(base(), str(DATA / "square"))
    assert main(["run", str(folder), "Hi", "--adapter-path", str(DATA / "square")]) == 1
    assert "uma lora import MODEL" in capsys.readouterr().err
    new, back = tmp_path / "new", tmp_path / "back"
    command = ["lora", "import", str(folder), "--adapter-path", str(DATA / "square"), "-o"]
    assert main([*command, str(new), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"] == 30
    assert np.abs(logits(load_adapters(base(), str(new))) - golden("square")).max() < 2e-4
    command = ["lora", "export", str(folder), "--adapter-path", str(new), "-o", str(back)]
    assert main(command) == 0
    assert main(command) == 2
    assert "exists" in capsys.readouterr().err
    kept = json.loads((back / "adapter_config.json").read_text())
    assert kept["lora_alpha"] == 8
