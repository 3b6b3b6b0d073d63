"""What --emit llama.cpp says of each card is what llama-fit-params puts there."""

import csv
import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from uma.architecture import architecture_from_config
from uma.engines.llama_cpp import LlamaCpp
from uma.plan.emit.split import OnCard, layer_counts, split_by_layers
from uma.units import GIB, MIB
from uma.workload import Inference

ROOT = Path(__file__).parent.parent
with (ROOT / "tests/data/llama_split.csv").open(encoding="utf-8") as file:
    ROWS = list(csv.DictReader(file))
NAMED = ("model", "quant", "options", "cards_gib")
CASES = [(key, list(rows)) for key, rows in groupby(ROWS, lambda row: [row[n] for n in NAMED])]


def split(model: str, quant: str, options: str, cards: str) -> tuple[OnCard, ...]:
    stored = json.loads((ROOT / f"uma/data/models/{model}.json").read_text("utf-8"))
    words = options.split()
    given = dict(zip(words[::2], map(int, words[1::2]), strict=True))
    sequences = given.get("-np", 1)
    settings = LlamaCpp(n_parallel=sequences, n_ubatch=given.get("-ub", 512))
    workload = Inference(given["-c"] // sequences, batch_size=sequences)
    memory = [int(size) * GIB for size in cards.split()]
    architecture = architecture_from_config(stored.get("config", stored))
    return split_by_layers(architecture, quant, workload, settings, memory)


@pytest.mark.parametrize(("key", "rows"), CASES, ids=[" ".join(key) for key, _ in CASES])
def test_each_card_holds_what_llama_fit_params_prints(
    key: list[str], rows: list[dict[str, Any]]
) -> None:
    """llama.cpp b11434 (scripts/record_llama_split.py), in whole MiB: 2 % of a card's sum."""
    for card, row in zip(split(*key), rows, strict=True):
        model, context, compute = (int(row[f"{n}_mib"]) for n in ("model", "context", "compute"))
        assert card.model_bytes / MIB == pytest.approx(model, abs=1.5)
        assert card.context_bytes / MIB == pytest.approx(context, abs=1)
        assert card.size_bytes / MIB == pytest.approx(model + context + compute, rel=0.02)


def test_the_cards_of_more_memory_get_more_layers_and_the_head_counts_as_one() -> None:
    assert layer_counts(32, [24, 12]) == [22, 10]
    assert layer_counts(32, [1, 1]) == [17, 15]
    assert layer_counts(32, [5]) == [32]
