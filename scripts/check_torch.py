#!/usr/bin/env python3
"""Count what PyTorch, transformers and PEFT keep in training, from their own objects.

Usage: check_torch.py FILE.json  (in an environment with torch, transformers and peft)

Small Llamas, and mixtures of experts, with random weights take one step on the CPU. Parameters,
gradients and optimizer states are counted from the objects; the peak is that of all storages alive,
seen by a dispatch mode, above the parameters and states. ``tests/data/torch_training.json`` is what
this wrote, with versions; ``tests/test_torch_golden.py`` compares the torch engine with it.
"""

import json
import sys
import weakref
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

CONFIG = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
EXPERTS = {
    "mixtral": {"intermediate_size": 256, "num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {"intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4},
    "qwen3_moe": {
        "moe_intermediate_size": 128,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "head_dim": 32,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
RANK, BATCH, LENGTH = 8, 2, 256
TARGETS = {"attention": ["q_proj", "k_proj", "v_proj", "o_proj"], "all": "all-linear"}


class Alive(TorchDispatchMode):
    """Bytes of the storages that operations made and something still refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.seen: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = {
            t.untyped_storage()._cdata for t in tree_iter(args) if isinstance(t, torch.Tensor)
        }
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in inputs and storage._cdata not in self.seen:
                    self._add(storage)
        return out

    def _add(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        self.seen[key] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.live -= self.seen.pop(key, 0)


def model_of(case: dict[str, Any]) -> Any:
    """A model of the case's family in its dtype, with adapters where it trains them."""
    family = case.get("family", "llama")
    config = transformers.AutoConfig.for_model(family, **CONFIG | EXPERTS.get(family, {}))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.to(getattr(torch, case["dtype"]))
    if case["method"] != "full":
        model = peft.get_peft_model(
            model,
            peft.LoraConfig(
                r=RANK,
                lora_dropout=0.0,
                target_modules=TARGETS[case["targets"]],
                use_dora=case["method"] == "dora",
            ),
        )
    if case["checkpoint"]:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": True})
    return model.train()


def measured(case: dict[str, Any]) -> dict[str, int]:
    """One step of the case: bytes by what they are, and the peak of forward and backward."""
    torch.manual_seed(0)
    model = model_of(case)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    ids = torch.randint(0, CONFIG["vocab_size"], (BATCH, LENGTH))
    alive = Alive()
    with alive:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    optimizer.step()
    states = [v for s in optimizer.state.values() for k, v in s.items() if k != "step"]
    frozen = [p for p in model.parameters() if not p.requires_grad]
    return {
        "frozen_bytes": sum(p.nbytes for p in frozen),
        "trained_bytes": sum(p.nbytes for p in trained),
        "trained_elements": sum(p.numel() for p in trained),
        "gradient_bytes": sum(p.grad.nbytes for p in trained),
        "state_bytes": sum(v.nbytes for v in states),
        "peak_bytes": alive.peak,
    }


def cases() -> list[dict[str, Any]]:
    found = []
    for dtype in ("bfloat16", "float32"):
        for checkpoint in (False, True):
            base = {"dtype": dtype, "checkpoint": checkpoint}
            found.append({**base, "method": "full", "targets": ""})
            for targets in TARGETS:
                found.append({**base, "method": "lora", "targets": targets})
    found.append(
        {"dtype": "bfloat16", "checkpoint": True, "method": "dora", "targets": "attention"}
    )
    for family in EXPERTS:
        for checkpoint in (False, True):
            base = {"family": family, "dtype": "bfloat16", "checkpoint": checkpoint}
            found.append({**base, "method": "full", "targets": ""})
            found.append({**base, "method": "lora", "targets": "attention"})
    return found


def main(path: Path) -> int:
    rows = [{**case, **measured(case)} for case in cases()]
    versions = {m.__name__: m.__version__ for m in (torch, transformers, peft)}
    shape = {"rank": RANK, "batch_size": BATCH, "length": LENGTH}
    models = {"config": CONFIG, "experts": EXPERTS}
    document = {"versions": versions, **models, **shape, "rows": rows}
    path.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
