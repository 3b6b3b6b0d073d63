"""Batch and length of measured training rows: told, or as the program's own recipe has them.

What a row leaves out is looked up by its program and page in ``RECIPES``. A length that only caps
data of unknown lengths is a bound: such a row is scored where every length up to it gives nearly
the same peak (``training.py``), as in full fine-tuning, whose peak is the optimizer's step. Batches
without padding are as long as their rows together: a mean one is known by the row's throughput.
"""

import re
from dataclasses import dataclass
from math import ceil, sqrt

from .rows import INCOMPLETE, MOST, Row, Skipped, decimal, number

# Words for lengths that are only caps on data whose lengths the row does not tell.
CAPS = re.compile(
    r"^max_length$|^max$|^max \(variable\)|^max; peak|padding_free|README states|^about"
)
VARIABLE = re.compile(r"variable|padded|padding.?free|longest|^max|README", re.IGNORECASE)
# Lengths deviate by this share of their mean: the median of 143 data sets in ms-swift's list
# (3602360a, Supported-models-and-datasets). Of thousands of sums the worst is so many deviations
# above the mean.
SPREAD, DEVIATIONS = 0.48, 4
LONGEST = re.compile(r"max (\d{2,6}) tokens")
UNPADDED = re.compile(r"variable, padding-free")
EVEN = re.compile(r"packing|packed|fixed")


@dataclass(frozen=True, slots=True)
class Recipe:
    """What the runs of a page take by default: rows of a batch, and tokens of its longest row.

    ``longest`` is 0 where its data are the user's. ``fixed`` says that every row has that length;
    ``bound`` that it is only a cap. ``accumulated`` are the batches of one step.
    """

    program: str
    page: str
    batch: int
    longest: int
    fixed: bool = False
    bound: bool = False
    accumulated: int = 1


RECIPES = (
    # modelscope/ms-swift 2386b9af, scripts/benchmark/config/tuner.json: ms-agent, whose longest row
    # has 2,740 tokens (docs, Supported-models-datasets), cut to its max_length.
    Recipe(r"ms-swift 2", r"/LLM/Benchmark", 1, 2048),
    # modelscope/ms-swift 3602360a, the scripts in these folders: swift/self-cognition and
    # alpaca-gpt4, whose longest rows have 131 and 607 tokens (Supported-models-and-datasets).
    Recipe(r"ms-swift", r"examples/train/(tuners|multi-gpu|streaming)/", 1, 131),
    Recipe(r"ms-swift", r"examples/train/full/train", 1, 607),
    # pytorch/torchtune, the table of May 2024: max_seq_len is set for it, to more than the longest
    # row of alpaca-cleaned (as below).
    Recipe(r"torchtune", r"May-Sep 2024", 4, 1028),
    # pytorch/torchtune: batch_size of the recipes, and max_seq_len of datasets/_alpaca.py from
    # 73647e26 (2024-03-30) to 8295cc35 (2024-08-15).
    Recipe(r"torchtune", r".", 2, 512),
    # Lightning-AI/litgpt, extensions/thunder/README.md and pretrain.py: TrainArgs, TinyStories.
    Recipe(r"litgpt extensions/thunder", r".", 4, 2048, fixed=True),
    # mlx-lm 0.32.2, lora.py, CONFIG_DEFAULTS.
    Recipe(r"^mlx_lm", r".", 4, 0),
    # pytorch/torchtitan, train_configs/llama3_8b.toml.
    Recipe(r"torchtitan", r".", 1, 8192, fixed=True),
    # fms-acceleration 876e2ed6, scripts/benchmarks: scenarios-moe.yaml without data_processing is
    # yahma/alpaca-cleaned, whose longest row has 1,028 tokens (ms-swift's list, by Qwen2.5's
    # tokenizer); scenarios-orca.yaml takes 8,000 rows of orca-math, cut to 4,096 tokens.
    Recipe(r"fms-acceleration", r"_moe\.csv", 8, 1028),
    Recipe(r"fms-acceleration", r"refs_orca", 0, 4096, bound=True, accumulated=2),
)


@dataclass(frozen=True, slots=True)
class Shape:
    """Rows of a batch, tokens of a row, and batches of a step.

    ``varies`` says that batches differ in length, ``bound`` that the length is only a cap.
    """

    batch: int
    length: int
    accumulated: int
    varies: bool = False
    bound: bool = False


def shape_of(row: Row) -> Shape:
    """The largest batch that the row was measured with.

    Raises:
        Skipped: If neither the row nor a recipe tells it.
    """
    recipe = _recipe(row)
    batch, length = number(row["micro_batch"]), number(row["seq_len"])
    kind = row["seq_len_kind"]
    told = LONGEST.search(kind)
    varies = bool(VARIABLE.search(kind)) and not EVEN.search(kind)
    bound = bool(CAPS.search(kind)) and not EVEN.search(kind)
    if told:
        length, bound = int(told[1]), False
    elif recipe and recipe.longest and (not length or bound):
        length = min(length or recipe.longest, recipe.longest)
        varies, bound = not recipe.fixed, recipe.bound
    batch = batch or (recipe.batch if recipe else 0)
    told_steps = row["grad_accum"] if row["grad_accum"].isdigit() else ""  # or a shell's words
    accumulated = number(told_steps) or (recipe.accumulated if recipe else 1)
    mean = _mean_length(row, batch * accumulated) if UNPADDED.search(kind) else 0
    if mean:
        worst = ceil(mean * (1 + DEVIATIONS * SPREAD / sqrt(batch)))
        length, bound = min(worst, length or worst), False
    if not batch or not length:
        raise Skipped(INCOMPLETE)
    return Shape(batch, length, accumulated, varies, bound)


def _mean_length(row: Row, rows: int) -> float:
    """Tokens of a mean row, by the tokens and seconds of a step; 0 where either is not told."""
    tokens = decimal(row["tokens_per_s"]) * decimal(row["s_per_it"])
    return tokens / rows if rows and tokens <= MOST else 0.0


def _recipe(row: Row) -> Recipe | None:
    for recipe in RECIPES:
        if re.search(recipe.program, row["framework"]) and re.search(recipe.page, row["source"]):
            return recipe
    return None
