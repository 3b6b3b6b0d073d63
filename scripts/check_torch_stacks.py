#!/usr/bin/env python3
"""Record what transformers, PEFT and DeepSpeed do of themselves in training, from real objects.

Usage: check_torch_stacks.py FILE.json  (where torch, transformers, peft and deepspeed are)

A small Llama in bfloat16 gets adapters, is prepared, checkpointed, and given to DeepSpeed on the
CPU; widths of its arrays are bytes an element. ``tests/data/torch_stacks.json`` is what this wrote;
``tests/test_training_stacks.py`` holds ``uma/plan/training/stacks.py`` against it.
"""

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import peft
import torch
import torch.distributed as dist
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

TARGETS = ["q_proj", "v_proj"]
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
}


def model() -> Any:
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=32,
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def adapted() -> Any:
    return peft.get_peft_model(model(), peft.LoraConfig(target_modules=TARGETS))


def widths(parameters: Any) -> list[int]:
    return sorted({parameter.element_size() for parameter in parameters})


def trained(one: Any) -> list[int]:
    return widths(p for p in one.parameters() if p.requires_grad)


def checkpointing() -> Any:
    """The keywords that the layers are checkpointed with."""
    one = model()
    one.gradient_checkpointing_enable()
    call = one.model.layers[0]._gradient_checkpointing_func
    return getattr(call, "keywords", None)


def under_deepspeed() -> dict[str, Any]:
    one = adapted()
    one.base_model.model.lm_head.to(torch.float32)  # as a prepared model has it
    optimizer = torch.optim.AdamW(p for p in one.parameters() if p.requires_grad)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29651", GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=0, world_size=1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled here
    engine, *_ = deepspeed.initialize(
        model=one, optimizer=optimizer, dist_init_required=False, config=DEEPSPEED
    )
    return {
        "trained": trained(engine.module),
        "all": widths(engine.module.parameters()),
        "autocast": engine.torch_autocast_enabled(),
    }


def without_sdpa() -> list[str]:
    """Types of models whose class for text says that it has no scaled dot product."""
    found = []
    for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        folder = Path(transformers.models.__path__[0]) / kind
        if (folder / f"modeling_{kind}.py").exists():
            module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
            if not getattr(getattr(module, name, None), "_supports_sdpa", True):
                found.append(kind)
    return sorted(found)


def main() -> None:
    arguments = transformers.TrainingArguments(output_dir="unused", use_cpu=True)
    found = {
        "versions": {m.__name__: m.__version__ for m in (torch, transformers, peft, deepspeed)},
        "optimizer": str(arguments.optim.value),
        "checkpointing": checkpointing(),
        "adapters": trained(adapted()),
        "base": widths(model().parameters()),
        "prepared": widths(peft.prepare_model_for_kbit_training(model()).parameters()),
        "deepspeed": under_deepspeed(),
        "without_sdpa": without_sdpa(),
    }
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
