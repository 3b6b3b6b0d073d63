"""Logits of LoRA adapters under PEFT and PyTorch, for tests/test_lora_peft.py.

In an environment with mlx-lm, ``python scripts/peft_golden.py export`` writes adapters of mlx-lm's
as PEFT's; then, in one with torch, transformers and peft, ``python scripts/peft_golden.py`` writes
adapters of PEFT's own and the logits of all. Made with torch 2.13.0, transformers 5.24.0 and
peft 0.21.2.
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OUT = ROOT / "tests" / "data" / "peft"
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import peft_base as base  # noqa: E402


def model() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {k: v for k, v in base.CONFIG.items() if k != "model_type"}
    made = LlamaForCausalLM(LlamaConfig(**settings)).eval()
    made.load_state_dict({k: torch.from_numpy(v) for k, v in base.weights().items()})
    return made


def logits(of: Any) -> list[list[float]]:
    import torch

    with torch.no_grad():
        found: list[list[float]] = of(torch.tensor([base.TOKENS])).logits[0].tolist()
    return found


def own_adapter(name: str) -> Any:
    import torch
    from peft import LoraConfig, get_peft_model

    made = get_peft_model(model(), LoraConfig(task_type="CAUSAL_LM", **base.PEFT[name])).eval()
    for key, value in made.named_parameters():
        if "lora_" in key:
            value.data = torch.from_numpy(base.factor(key, value.detach().numpy()))
    made.save_pretrained(OUT / name)
    (OUT / name / "README.md").unlink()
    return made


def main() -> None:
    from peft import PeftModel

    warnings.simplefilter("ignore")
    found = {"base": logits(model())}
    found |= {name: logits(own_adapter(name)) for name in base.PEFT}
    for name in base.MLX:
        folder = OUT / f"exported_{name}"
        found[f"exported_{name}"] = logits(PeftModel.from_pretrained(model(), folder).eval())
    rounded = {k: [[round(x, 5) for x in row] for row in rows] for k, rows in found.items()}
    (OUT / "logits.json").write_text(json.dumps(rounded) + "\n")


def export() -> None:
    import test_lora_peft

    for name in base.MLX:
        test_lora_peft.exported(name, OUT / f"exported_{name}")


if __name__ == "__main__":
    export() if sys.argv[1:] == ["export"] else main()
