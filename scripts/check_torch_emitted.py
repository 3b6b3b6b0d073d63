#!/usr/bin/env python3
"""Run what ``uma compare --emit`` writes for PyTorch, on tiny models and the CPU; record it.

Usage: check_torch_emitted.py FILE.json  (in an environment with torch, transformers, accelerate,
peft, bitsandbytes and deepspeed)

``tests/data/emitted.json`` is what this wrote, with versions: every text, and what came of it.
``tests/test_emit_torch.py`` holds today's texts against it. Card 0 of the scripts stands for a
card; here it is the CPU under another name, so that bitsandbytes converts what is there and
leaves what is on the host and on disk.
"""

import contextlib
import io
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import accelerate
import bitsandbytes
import deepspeed
import peft
import safetensors
import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import emitted_cases as cases  # noqa: E402

from uma.plan.emit.training import training_configuration  # noqa: E402

CARD = """
class Card(str):
    __eq__ = lambda self, other: type(other) is Card
    __ne__ = lambda self, other: type(other) is not Card
    __hash__ = str.__hash__
CARD = Card("cpu")
"""
TEXTS = ["The quick brown fox jumps over the lazy dog.", "To be, or not to be."] * 2


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    found: dict[str, Any] = {"versions": versions(), "accelerate": {}, "training": {}}
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        model = saved_model(Path(name) / "model")
        for case in cases.ACCELERATE:
            text = cases.accelerate_script(case)
            found["accelerate"][case] = {"text": text, **run_inference(text, model)}
        for case in cases.TRAINING:
            text = training_configuration(*cases.TRAINING[case])
            found["training"][case] = {"text": text, **run_training(case, text, model)}
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")
    for kind in ("accelerate", "training"):
        for case, result in found[kind].items():
            print(case, {key: value for key, value in result.items() if key != "text"})


def versions() -> dict[str, str]:
    modules = (accelerate, bitsandbytes, deepspeed, peft, torch, transformers)
    return {module.__name__: module.__version__ for module in modules}


def saved_model(folder: Path) -> Path:
    """A tiny Llama with random weights and a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{k: v for k, v in cases.TINY.items() if k != "model_type"})
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"</s>": 0} | {c: i + 1 for i, c in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>"
    ).save_pretrained(folder)
    return folder


def here(text: str, model: Path) -> str:
    """The script for this folder and this machine's one device."""
    text = text.replace(repr(cases.MODEL), repr(str(model)))
    return CARD + text.replace(": 0,", ": CARD,")


def run_inference(text: str, model: Path) -> dict[str, Any]:
    """What the script loaded: bytes by place and width, and the error of its logits."""
    space: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(here(text, model), "emitted", "exec"), space)
    loaded, tokens = space["model"], torch.tensor([[5, 6, 7, 8]])
    whole = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        expected, got = whole(tokens).logits, loaded(tokens).logits.float()
    sizes: dict[str, int] = {}
    for name, parameter in loaded.named_parameters():
        key = f"{place_of(name, space['DEVICE_MAP'])} {str(parameter.dtype).removeprefix('torch.')}"
        sizes[key] = sizes.get(key, 0) + parameter.numel() * parameter.element_size()
    return {
        "printed": bool(printed.getvalue().strip()),
        "parameter_bytes": sizes,
        "relative_error": round(float((got - expected).norm() / expected.norm()), 3),
    }


def place_of(name: str, device_map: dict[str, Any]) -> str:
    key = max((k for k in device_map if name == k or name.startswith(f"{k}.") or not k), key=len)
    return device_map[key] if type(device_map[key]) is str else "card"  # CARD is of its own type


def run_training(case: str, text: str, model: Path) -> dict[str, Any]:
    target, training = cases.TRAINING[case]
    if target == "deepspeed":
        return {"accepted": by_deepspeed(text, training.workload.sharding.data)}
    if target == "fsdp":
        return {"accepted": by_accelerate(text)}
    Path("data.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    on_cpu = here(text, model).replace('int(os.environ.get("LOCAL_RANK", 0))', '"cpu"')
    on_cpu = on_cpu.replace('output_dir="training",', 'output_dir="training", use_cpu=True,')
    Path("train.py").write_text(on_cpu)
    command = [sys.executable, "train.py", "data.jsonl"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    saved = Path("trained" if training.workload.method == "full" else "adapters")
    with safetensors.safe_open(next(saved.glob("*.safetensors")), "pt") as file:
        names = list(file.keys())
    shutil.rmtree(saved)
    return {"steps": len(re.findall(r"'loss': '?[0-9.]", ran.stdout)), "saved_arrays": len(names)}


class Group:
    """A process group of so many devices, seen from the first."""

    def __init__(self, devices: int) -> None:
        self.devices = devices

    def is_initialized(self) -> bool:
        return True

    def get_rank(self, group: Any = None) -> int:
        return 0

    def get_world_size(self, group: Any = None) -> int:
        return self.devices


def by_deepspeed(text: str, devices: int) -> dict[str, Any]:
    """What DeepSpeed's own classes read in the file, as one of so many processes."""
    from deepspeed.runtime.config import DeepSpeedConfig

    deepspeed.comm.comm.cdb = Group(devices)  # else it asks, and finds one process
    config = DeepSpeedConfig(json.loads(text))
    deepspeed.comm.comm.cdb = None
    zero = config.zero_config
    places = (zero.offload_optimizer, zero.offload_param)
    Path("ds.json").write_text(text)
    return {
        "stage": int(config.zero_optimization_stage),
        "rows": config.train_batch_size,
        "optimizer": config.optimizer_name,
        "offload": [place and str(place.device) for place in places],
        "stage_by_accelerate": accelerate.DeepSpeedPlugin(hf_ds_config="ds.json").zero_stage,
    }


def by_accelerate(text: str) -> dict[str, Any]:
    """What accelerate's launcher reads in the file, and its plugin in what the launcher sets."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    Path("fsdp.yaml").write_text(text)
    command = ["--config_file", "fsdp.yaml", "train.py"]
    arguments, config, _ = _validate_launch_command(launch_command_parser().parse_args(command))
    before = dict(os.environ)
    os.environ |= prepare_multi_gpu_env(arguments)
    # FSDP 1 looks for a card to send what one process has read to the others.
    os.environ |= {"FSDP_SYNC_MODULE_STATES": "false", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
    plugin = accelerate.FullyShardedDataParallelPlugin()
    os.environ.clear()
    os.environ |= before
    return {
        "processes": config.num_processes,
        "mixed_precision": arguments.mixed_precision,
        "version": plugin.fsdp_version,
        "reshard_after_forward": bool(plugin.reshard_after_forward),
        "strategy": getattr(plugin.sharding_strategy, "name", None),
        "offload": type(plugin.cpu_offload).__name__,
        "activation_checkpointing": plugin.activation_checkpointing,
    }


if __name__ == "__main__":
    main()
