"""The commands that train a planned workload on a Mac: uma's own."""

import shlex
from collections.abc import Iterator

from uma.plan.compare.recipes import Recipe
from uma.units import printable


def mlx_training(model: str, recipe: Recipe, title: str) -> str:
    """``uma lora train``, after the model is in the width that was planned."""
    return "\n".join([f"# {printable(title, kept='')}", *_lines(model, recipe)])


def _lines(model: str, recipe: Recipe) -> Iterator[str]:
    asked = recipe.workload
    folder = f"{model.rpartition('/')[2]}-{recipe.bits}bit"
    yield f"# the weights in {recipe.bits} bits, as MLX has them"
    yield shlex.join(["uma", "convert", model, "--bits", str(recipe.bits), "-o", folder])
    arguments = ["uma", "lora", "train", folder, "--data", "DATA", "--fine-tune-type", asked.method]
    yield "# --num-layers -1: all layers; uma lora train takes the last 16 unless it is told"
    yield f"# --max-seq-length {asked.max_seq_length}: what the plan was made for"
    if asked.method != "full":
        arguments += ["--rank", str(asked.rank)]
    arguments += ["--num-layers", "-1", "--batch-size", str(asked.batch_size)]
    arguments += ["--max-seq-length", str(asked.max_seq_length), "--optimizer", asked.optimizer]
    yield shlex.join(arguments)
