"""Every table of docs/training-memory.md, computed anew, and what its sentences make of them."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import docs_outputs  # noqa: E402
import training_tables as tables  # noqa: E402
from training_page import cases  # noqa: E402
from training_page.rules import rules_table  # noqa: E402

from uma.cli import main  # noqa: E402
from uma.machine import verdict  # noqa: E402
from uma.plan.training.stack import Stack  # noqa: E402
from uma.units import GB  # noqa: E402
from uma.workload import Sharding  # noqa: E402

PAGE = (ROOT / "docs" / "training-memory.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", tables.TABLES)
def test_each_table_of_the_page_is_what_the_library_computes(name: str) -> None:
    assert tables.table(name) in PAGE, "python scripts/training_tables.py"


def test_no_table_with_a_name_is_left_unwritten() -> None:
    assert set(re.findall(r"<!-- table: (\w+) -->", PAGE)) == set(tables.TABLES)


def test_each_output_of_the_page_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    blocks = docs_outputs.BLOCK.findall(PAGE)
    assert blocks
    for command, shown in blocks:
        main(shlex.split(command)[1:])
        printed = capsys.readouterr().out
        assert printed == shown, "python scripts/docs_outputs.py docs/training-memory.md"


@pytest.mark.parametrize(("stack", "update"), [(cases.MIXED, 0), (cases.OF_2024, 4)])
def test_sixteen_bytes_are_all_unless_the_update_makes_a_root(stack: Stack, update: int) -> None:
    """Weights 4, gradients 4, moments 8; the foreach variant of AdamW takes 4 more."""
    asked = {"method": "full", "max_seq_length": 2048, **cases.ONE_ROW}
    case = cases.torch("llama-2-7b-hf", stack=stack, **asked)
    bytes_each = case.needed_bytes() / case.architecture.num_parameters
    assert bytes_each == pytest.approx(16 + update, abs=0.05)


RULES = list(rules_table())
RUN = [row for row in RULES if "GB" in row[1] and "--max-seq-length" in row[3]]


@pytest.mark.parametrize("row", RUN, ids=[row[0] for row in RUN])
def test_what_a_rule_asks_gives_what_stands_beside_it(
    row: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = row[3].strip("`")
    for length in re.findall(r"([\d,]+) tokens", row[1]) or [""]:
        words = asked.replace(" N", f" {length.replace(',', '')}").split()
        machine = ["--machine", "8xa100-80gb" if "--devices" in words else "a100-80gb"]
        optimizer = [] if "--optimizer" in words else ["--optimizer", "adamw"]
        common = ["--batch-size", "1", "--grad-checkpoint", "--json"]
        main(["estimate", *words, *machine, *optimizer, *common])
        found = json.loads(capsys.readouterr().out)["total_bytes"]
        assert cases.gb(found) in row[1]


def test_embeddings_and_head_make_the_other_half_of_a_prepared_4_bit_base() -> None:
    case = cases.torch("llama-3-8b", stack=cases.PREPARED, quantized="nf4")
    outside = 4 * sum(p.size for p in case.architecture.parameters)
    assert outside / cases.term(case, "weights") == pytest.approx(0.5, abs=0.03)


def test_sharding_alone_does_not_bring_a_70b_onto_8_cards_and_the_host_does() -> None:
    asked = {"method": "full", "max_seq_length": 2048, "mem_kind": "device", **cases.ONE_ROW}
    found = {}
    for place in ("", "host"):
        spread = Sharding(data=8, zero_stage=3, offload_optimizer=place)  # type: ignore[arg-type]
        case = cases.torch("llama-3-70b", "8xa100-80gb", sharding=spread, **asked)
        found[place] = verdict(8 * case.needed_bytes(), case.budget)
    assert found == {"": "exceeds", "host": "fits"}


def test_a_70b_base_in_4_bits_is_larger_than_a_card_of_24_gb() -> None:
    assert cases.term(cases.torch("llama-3-70b", quantized="nf4-double"), "weights") > 24 * GB


def test_every_layer_is_best_unless_the_loss_binds() -> None:
    rows = {row[0]: row for row in tables.checkpointing_table()}
    sizes = {
        name: [float(cell.split()[0]) for cell in row[3:5]]
        for name, row in rows.items()
        if "4,096" in name
    }
    assert sizes["Llama-2-7B, 4,096"][0] < sizes["Llama-2-7B, 4,096"][1]
    assert sizes["Llama-3-8B, 4,096"][0] > sizes["Llama-3-8B, 4,096"][1]


def test_attention_in_full_makes_memory_quadratic_only_without_checkpointing() -> None:
    plain, checkpointed = (
        [
            cases.mlx("llama-3-8b", 4, max_seq_length=n, grad_checkpoint=k).needed_bytes()
            for n in (1024, 4096)
        ]
        for k in (0, 1)
    )
    assert plain[1] > 5 * plain[0]
    assert checkpointed[1] < 4 * checkpointed[0]
