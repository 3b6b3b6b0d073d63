"""`uma compare` as it is called: its table, JSON and CSV, exit codes, and what it refuses."""

import csv
import io
import json
from typing import Any

import pytest

from uma.cli import main

PLAN_CONTRACT = {
    "machine",
    "kind",
    "devices",
    "technique",
    "device_bytes",
    "host_bytes",
    "disk_bytes",
    "budget_bytes",
    "verdict",
    "decode_tps",
    "prompt_tps",
    "price_usd",
    "notes",
}
ASKED = (
    "compare llama-3-70b --context 16384 --machine mac-studio-m2-ultra-192 --machine rtx-4090 "
    "--machine 2xrtx-3090 --machine h100"
)


def document(capsys: pytest.CaptureFixture[str], command: str) -> dict[str, Any]:
    assert main([*command.split(), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_document_has_the_contracts_names(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, ASKED)
    assert {"schema_version", "model", "workload", "plans"} <= set(found)
    assert len(found["plans"]) == 4
    for plan in found["plans"]:
        assert set(plan) >= PLAN_CONTRACT
        assert plan["kind"] == ("unified" if "mac" in plan["machine"] else "discrete")
        assert plan["decode_tps_low"] < plan["decode_tps"] < plan["decode_tps_high"]
        assert plan["prompt_tps_low"] < plan["prompt_tps"] < plan["prompt_tps_high"]
        assert plan["ttft_s"] > 16_384 / plan["prompt_tps"]


def test_what_is_unknown_is_null_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    plan = document(capsys, "compare llama-3-70b --machine 8xh100")["plans"][0]
    assert plan["engine"] == "vllm"
    assert plan["prompt_tps"] is None
    assert "vllm" in plan["prompt_tps_reason"]
    assert plan["price_usd"] is None
    assert "--host-price" in plan["price_reason"]
    assert plan["devices_price_usd"] == 240_000


def test_each_user_of_several_has_a_part_of_the_total(capsys: pytest.CaptureFixture[str]) -> None:
    plan = document(capsys, "compare llama-3.1-8b --machine h100 --concurrency 8")["plans"][0]
    assert plan["total_decode_tps"] == pytest.approx(8 * plan["decode_tps"], rel=1e-3)


def test_the_table_says_what_was_asked_and_why_nothing_is_better(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(ASKED.split()) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0].startswith(
        "llama-3-70b at 16,384 tokens of context, one request at a time; at least 4 bits"
    )
    assert "--host-ram" in text
    assert "why nothing better:" in text
    assert "rtx-4090: F16" in text
    assert "####" in text


def test_the_default_is_this_machine_and_twelve_others(capsys: pytest.CaptureFixture[str]) -> None:
    plans = document(capsys, "compare llama-3.1-8b")["plans"]
    assert len(plans) == 13
    assert plans[0]["machine"] == "this machine"
    assert all(plan["sold"] for plan in plans[1:])
    assert {plan["kind"] for plan in plans[1:]} == {"unified", "discrete"}
    kinds = [plan["kind"] for plan in plans[1:]]
    assert kinds.count("unified") == kinds.count("discrete") == 6


def test_a_context_beyond_the_models_own_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    command = "compare llama-3-8b --machine h100 --machine mac-studio-m2-ultra-192 --context"
    said = "the model was made for 8,192 tokens of context"
    assert all(said in plan["notes"] for plan in document(capsys, f"{command} 8193")["plans"])
    assert not any(said in plan["notes"] for plan in document(capsys, f"{command} 8192")["plans"])


def test_a_spreadsheet_has_a_line_a_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED.split(), "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["machine"] for row in rows].count("rtx-4090") == 1
    assert len(rows) == 4
    assert PLAN_CONTRACT - {"notes"} <= set(rows[0])


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("compare llama-3-70b --machine rtx-4060-8gb --host-ram 16GB", 3, ""),
        ("compare llama-3-70b --machine nonsense-*", 2, "uma machines"),
        ("compare llama-3-70b --machine 2xmac-*", 2, "only graphics cards are counted"),
        ("compare no-such-model --machine h100", 2, "no model is called"),
        ("compare llama-3-70b --machine h100 --csv --json", 2, "one of them"),
        ("compare llama-3-70b --machine h100 --all", 2, "leave out"),
        ("compare llama-3-70b --price 4090", 2, "NAME=USD"),
        ("compare llama-3-70b --price nonsense=5 --machine h100", 2, "nonsense"),
        ("compare llama-3-70b --min-tps nan", 2, "--min-tps nan"),
        ("compare llama-3-70b --host-bandwidth inf", 2, "--host-bandwidth inf"),
    ],
)
def test_exit_codes_and_what_is_refused(
    capsys: pytest.CaptureFixture[str], command: str, code: int, said: str
) -> None:
    assert main(command.split()) == code
    assert said in capsys.readouterr().err


def test_a_host_that_is_described_decides_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    command = "compare llama-3-70b --machine rtx-4090 --min-bits 8"
    small = document(capsys, command)["plans"][0]
    large = document(capsys, f"{command} --host-ram 256GB --host-bandwidth 400")["plans"][0]
    assert large["decode_tps"] > 2 * small["decode_tps"]
    assert main([*command.split(), "--host-ram", "32GB"]) == 3


def test_ones_own_price_and_that_of_the_host_are_added(capsys: pytest.CaptureFixture[str]) -> None:
    command = "compare llama-3.1-8b --machine rtx-4090 --price rtx-4090=1800 --host-price 900"
    found = document(capsys, command)
    assert found["plans"][0]["price_usd"] == 2700
    assert found["cheapest"] == "rtx-4090"
