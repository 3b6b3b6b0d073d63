"""`uma models --fits`: what is told to fit, held against `uma estimate` of the same."""

import csv
import json
import shlex
from functools import cache
from typing import Any

import pytest

pytest.importorskip("typer")

from uma.catalog import DATA, find_model, has_words, models
from uma.catalog.uses import known_uses, uses_of
from uma.cli import main
from uma.errors import UnknownName
from uma.machine.here import machine_of
from uma.plan.choice import FEW_BITS, Choices, Wanted, what_fits
from uma.units import GIB, format_gib

AIR, STUDIO, CARD = "macbook-air-m4-16", "mac-studio-m3-ultra-512", "rtx-4090"


@cache
def chosen(machine: str, text: str = "qwen3", context_tokens: int = 8192) -> Choices:
    return what_fits(machine_of(machine), Wanted(context_tokens, text=text), ["--machine", machine])


def estimated(capsys: pytest.CaptureFixture[str], command: str) -> dict[str, Any]:
    program, *words = shlex.split(command)
    assert program == "uma"
    main([*words, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("machine", [AIR, STUDIO, CARD])
def test_the_command_of_a_model_gives_the_same_figures(
    machine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = chosen(machine).found
    assert len(found) > 5
    for one in found[::4]:
        told = estimated(capsys, one.command)
        assert told["total_bytes"] == one.total_bytes, one.command
        assert told["verdict"] == one.verdict
        assert told["max_context_tokens"] == one.max_context_tokens
        assert told["tight_context_tokens"] == one.tight_context_tokens


def test_the_list_tells_a_context_that_is_only_tight_as_such(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["models", "--fits", "--machine", AIR, "ministral-3-14b"])
    (row,) = [line for line in capsys.readouterr().out.splitlines() if " tight " in line]
    (one,) = chosen(AIR, "ministral-3-14b").found
    assert one.max_context_tokens is not None
    assert f"{one.max_context_tokens:,} (tight up to {one.tight_context_tokens:,})" in row


def test_memory_is_what_a_model_needs_not_the_pool_that_fills_the_budget(
    capsys: pytest.CaptureFixture[str],
) -> None:
    full = [one for one in chosen(AIR).found if one.total_bytes == 8 * GIB]
    assert full
    main(["models", "--fits", "--machine", AIR, "qwen3", "--limit", "0"])
    out = capsys.readouterr().out
    assert "without the pool of freed buffers" in out
    lines = {line.split()[0]: line for line in out.splitlines() if line}
    for one in full:
        terms = estimated(capsys, one.command)["terms"]
        (pool,) = [term["size_bytes"] for term in terms if term["name"] == "buffer_pool"]
        assert 0 < pool == one.total_bytes - one.needed_bytes
        assert f" {format_gib(one.needed_bytes)} " in lines[one.model.name]


@pytest.mark.parametrize("machine", [AIR, CARD])
def test_no_wider_format_would_fit(machine: str, capsys: pytest.CaptureFixture[str]) -> None:
    wider = {4: 5, 5: 6, 6: 8, 8: 16}
    for one in [one for one in chosen(machine).found if one.bits in wider][::3]:
        command = ["uma", "estimate", one.model.name, "--machine", machine]
        command += ["--bits", str(wider[one.bits]), "--context", "8192"]
        if one.verdict == "fits":
            assert estimated(capsys, shlex.join(command))["verdict"] != "fits"


def test_what_is_told_to_fit_is_within_the_budget_and_what_is_tight_within_the_limit() -> None:
    for machine in (AIR, STUDIO, CARD):
        choices = chosen(machine)
        for one in choices.found:
            if one.verdict == "fits":
                assert one.headroom_bytes >= 0
            else:
                assert one.verdict == "tight"
                assert one.total_bytes <= choices.budget.limit_bytes


def test_fewer_than_4_bits_are_only_for_what_exceeds_in_4_and_fits_in_3(
    capsys: pytest.CaptureFixture[str],
) -> None:
    machine = "mac-mini-m4-24"
    low = [one for one in chosen(machine).found if one.bits < FEW_BITS]
    assert low
    for one in low:
        command = f"uma estimate {one.model.name} --machine {machine} --bits 4 --context 8192"
        assert estimated(capsys, command)["verdict"] == "exceeds"
        assert one.verdict == "fits"
        assert "answers suffer" in one.notes[0]


def test_the_largest_stands_first() -> None:
    sizes = [one.parameters for one in chosen(STUDIO).found]
    assert sizes == sorted(sizes, reverse=True)


def test_a_model_that_is_stored_in_4_bits_is_never_offered_in_more() -> None:
    formats = {one.model.name: one.bits for one in chosen(STUDIO, "gpt-oss").found}
    assert formats == {"gpt-oss-120b": 4, "gpt-oss-20b": 4}


def test_a_model_that_the_engine_cannot_run_is_not_offered_and_said_why(
    capsys: pytest.CaptureFixture[str],
) -> None:
    document = models_json(capsys, "grok", "--machine", STUDIO, "--engine", "mlx")
    assert document["models"] == []
    (left_out,) = document["not_estimated"]
    assert left_out == {"name": "grok-1", "reason": "mlx-lm has no module for grok-1"}


def test_more_context_leaves_no_more_models_and_none_that_is_made_for_less() -> None:
    short, long = chosen(AIR), chosen(AIR, context_tokens=65_536)
    assert {one.model.name for one in long.found} < {one.model.name for one in short.found}
    assert long.too_short > 0
    assert all((one.model.context_tokens or 65_536) >= 65_536 for one in long.found)


def test_a_speed_that_is_asked_for_takes_fewer_bits_or_leaves_the_model_out() -> None:
    any_speed = {one.model.name: one for one in chosen(STUDIO).found}
    fast = what_fits(machine_of(STUDIO), Wanted(text="qwen3", min_tps=30))
    assert fast.too_slow > 0
    assert len(fast.found) + fast.too_slow == len(any_speed)
    for one in fast.found:
        assert one.speed.decode_tps is None or one.speed.decode_tps >= 30
        assert FEW_BITS <= one.bits <= any_speed[one.model.name].bits
    assert any(one.bits < any_speed[one.model.name].bits for one in fast.found)


def test_speeds_have_an_interval_or_a_reason() -> None:
    for machine in (AIR, CARD):
        for one in chosen(machine).found:
            speed = one.speed
            if speed.decode_tps is None:
                assert speed.reason
            else:
                assert speed.decode_tps_low <= speed.decode_tps <= speed.decode_tps_high


def test_the_default_model_is_named_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    """Its short name means the copy that comes with the program, in a format of its own."""
    (one,) = chosen(AIR, "smollm2-135m").found
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in one.command
    assert estimated(capsys, one.command)["total_bytes"] == one.total_bytes


def test_this_machine_is_told_to_run_it(capsys: pytest.CaptureFixture[str]) -> None:
    document = models_json(capsys, "qwen3-0.6b", "--engine", "mlx")
    (one,) = document["models"]
    assert one["command"].startswith("uma run qwen3-0.6b --bits ")


def test_a_mac_may_be_told_by_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    one = models_json(capsys, "qwen3-8b", "--ram", "24GB")["models"][0]
    assert "--ram 24GB" in one["command"]
    assert estimated(capsys, one["command"])["total_bytes"] == one["total_bytes"]


def models_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    main(["models", "--fits", "--json", *arguments])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_table_ends_where_one_would_not_read_on_and_json_does_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["models", "--fits", "--machine", AIR, "qwen3", "--limit", "3"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [one.model.name for one in chosen(AIR).found]
    assert [line.split()[0] for line in lines[3:6]] == names[:3]
    assert any("smaller ones were not looked at" in line for line in lines)
    everything = models_json(capsys, "qwen3", "--machine", AIR)
    assert [one["name"] for one in everything["models"]] == names


def test_json_has_bytes_and_null_with_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    document = models_json(capsys, "qwen2.5", "--machine", AIR, "--use", "coding")
    assert document["budget_bytes"] == 8 * GIB
    assert "no ranking of quality" in document["order"]
    assert {use["use"] for one in document["models"] for use in one["uses"]} >= {"coding"}
    for one in document["models"]:
        assert isinstance(one["total_bytes"], int)
        assert (one["decode_tps"] is None) == (one["decode_tps_reason"] is not None)


def test_a_table_says_what_is_not_on_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--fits", "--machine", AIR, "llama"]) == 0
    out = capsys.readouterr().out
    assert "size is no ranking of quality" in out
    assert " do not fit" in out
    assert " are made for less than 8,192 tokens" in out


def test_nothing_that_fits_is_exit_code_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--fits", "--machine", AIR, "deepseek-v3"]) == 3
    assert main(["models", "--fits", "--machine", AIR, "no such model"]) == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--use", "coding"),
        ("--machine", AIR),
        ("--fits", "--use", "cooking"),
        ("--fits", "--machine", "no such machine"),
        ("--fits", "--budget", "8"),
        ("--fits", "--machine", AIR, "--min-tps", "nan"),
    ],
)
def test_what_cannot_be_asked_is_a_usage_error(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", *arguments]) == 2
    assert capsys.readouterr().err.startswith("uma: ")


def test_a_use_is_known_from_a_name_or_a_page_and_else_unknown() -> None:
    assert [one.use for one in uses_of("Qwen/Qwen3-Coder-30B-A3B-Instruct")] == ["coding", "chat"]
    assert uses_of("deepseek-ai/DeepSeek-V3") == ()
    with pytest.raises(UnknownName, match="chat, coding"):
        what_fits(machine_of(AIR), Wanted(use="cooking"))


def test_every_row_of_the_uses_has_its_source_and_means_a_model() -> None:
    with open(DATA / "uses.csv", encoding="utf-8", newline="") as file:
        next(file)
        rows = list(csv.DictReader(file))
    assert {row["use"] for row in rows} == set(known_uses())
    for row in rows:
        assert row["source"]
        if row["match"] == "model":
            assert find_model(row["name"]) is not None, row
            assert row["source"].startswith("https://")
        else:
            names = [model.hf_id.partition("/")[2] for model in models()]
            assert any(has_words(name, row["name"]) for name in names), row
