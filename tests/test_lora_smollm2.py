"""The default model learns the chips of the catalog, in mlx_lm too."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
CHIPS = ROOT / "uma" / "data" / "chips.csv"


def written(folder: Path) -> Path:
    """Questions and answers about the memory bandwidth of every chip, of ``chips.csv``."""
    folder.mkdir()
    lines = [line for line in CHIPS.read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    chips = {row["chip"]: row["bandwidth_gb_per_s"] for row in csv.DictReader(lines)}
    asked = ("What is the memory bandwidth of the Apple {}?", "How fast is the memory of the {}?")
    for name, questions in (("train", asked), ("valid", ("Tell me the bandwidth of the {}.",))):
        rows = [
            {"prompt": q.format(chip), "completion": f"The Apple {chip} has {rate} GB/s."}
            for chip, rate in chips.items()
            for q in questions
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return folder


ANSWERS = """
import json, sys
from pathlib import Path
from uma.paths import cache_folder
from uma.runtime.blas import prepare_cpu
prepare_cpu(cache_folder())
import mlx.core as mx
import mlx_lm
from uma.runtime.load import load
run = Path(sys.argv[1])
base = Path(json.loads((run / "adapter_config.json").read_text())["model"])
plain = load(base, dequantize_to="float32")
tuned = load(base, dequantize_to="float32", adapter_path=run)
theirs, _ = mlx_lm.load(str(base), adapter_path=str(run))
theirs.set_dtype(mx.float32)  # 4-bit weights with float16 scales are slow on the CPU
question = [{"role": "user", "content": "What is the memory bandwidth of the Apple M2 Pro?"}]
prompt = plain.tokenizer.apply_chat_template(question, add_generation_prompt=True)
models = (plain.model, tuned.model, theirs)
answers = [mlx_lm.generate(m, plain.tokenizer, prompt, max_tokens=10) for m in models]
print(json.dumps(answers))
"""


def output(*arguments: str) -> Any:
    """What a process of its own prints, where OpenBLAS comes before MLX."""
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    return json.loads(done.stdout)


@pytest.mark.slow
def test_the_default_model_learns_and_mlx_lm_answers_the_same(tmp_path: Path) -> None:
    data, run = written(tmp_path / "data"), tmp_path / "run"
    command = ["-m", "uma", "lora", "train", "--data", str(data), "--mask-prompt", "--json"]
    command += ["--iters", "6", "--learning-rate", "2e-4", "--num-layers", "-1", "--val-batches"]
    found = output(*command, "2", "--adapter-path", str(run), "--allow-concurrent")
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    first = next(event["val_loss"] for event in log if event["event"] == "validation")
    assert found["val_loss"] < 0.5 * first
    plain, tuned, theirs = output("-c", ANSWERS, str(run))
    assert tuned == theirs
    assert tuned.startswith("The Apple M2 Pro has ")
    assert not plain.startswith("The Apple M2 Pro has ")
