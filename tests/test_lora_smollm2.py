"""The default model learns the chips of the catalog, in mlx_lm too."""

import csv
import json
from pathlib import Path

import pytest

from uma.cli import main

CHIPS = Path(__file__).parents[1] / "uma" / "data" / "chips.csv"


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


@pytest.mark.slow
def test_the_default_model_learns_and_mlx_lm_answers_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import mlx.core as mx
    import mlx_lm

    from uma.runtime.load import load

    command = ["lora", "train", "--data", str(written(tmp_path / "data")), "--mask-prompt"]
    command += ["--iters", "6", "--learning-rate", "2e-4", "--num-layers", "-1", "--val-batches"]
    command += ["2", "--adapter-path", str(tmp_path / "run"), "--json", "--allow-concurrent"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    first = next(event["val_loss"] for event in log if event["event"] == "validation")
    assert found["val_loss"] < 0.5 * first

    base = Path(json.loads((tmp_path / "run" / "adapter_config.json").read_text())["model"])
    plain = load(base, dequantize_to="float32")
    tuned = load(base, dequantize_to="float32", adapter_path=tmp_path / "run")
    theirs, _ = mlx_lm.load(str(base), adapter_path=str(tmp_path / "run"))
    theirs.set_dtype(mx.float32)  # 4-bit weights with float16 scales are slow on the CPU
    question = [{"role": "user", "content": "What is the memory bandwidth of the Apple M2 Pro?"}]
    prompt = plain.tokenizer.apply_chat_template(question, add_generation_prompt=True)
    answers = [
        mlx_lm.generate(model, plain.tokenizer, prompt, max_tokens=10)
        for model in (plain.model, tuned.model, theirs)
    ]
    assert answers[1] == answers[2]
    assert answers[1].startswith("The Apple M2 Pro has ")
    assert not answers[0].startswith("The Apple M2 Pro has ")
