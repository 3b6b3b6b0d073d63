"""The rates in ``uma estimate --json`` are those of ``uma compare``, with their intervals."""

import json
from typing import Any

import pytest

from uma.cli import main


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    main([*arguments, "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("machine", "bits"),
    [("mac-studio-m2-ultra-192", ["--bits", "4"]), ("rtx-4090", ["--quant", "Q4_K_M"])],
)
@pytest.mark.parametrize("model", ["llama-3-8b", "qwen3-30b-a3b"])
def test_an_estimate_tells_the_rates_of_the_same_plan(
    capsys: pytest.CaptureFixture[str], model: str, machine: str, bits: list[str]
) -> None:
    """Within what it makes that compare knows the width of each matrix, and this one a mean."""
    asked = [model, "--machine", machine]
    found = document(capsys, "estimate", *asked, *bits)
    wanted = ["--min-tps", "10000", "--prefer", "speed"]  # so that it goes down to four bits
    (plan,) = document(capsys, "compare", *asked, *wanted)["plans"]
    assert plan["bits"] == 4
    for name in ("decode_tps", "prompt_tps"):
        assert found[name] == pytest.approx(plan[name], rel=0.05), name
        assert found[f"{name}_low"] <= found[name] <= found[f"{name}_high"]


def test_each_of_several_sequences_is_slower_and_all_together_faster(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["estimate", "llama-3-8b", "--machine", "rtx-4090"]
    one, eight = (document(capsys, *asked, "--batch-size", n)["decode_tps"] for n in "18")
    assert eight < one < 8 * eight


def test_a_quantized_cache_is_read_faster(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["estimate", "llama-3.1-8b", "--machine", "rtx-4090", "-c", "65536"]
    plain, quantized = (
        document(capsys, *asked, *cache)["decode_tps"]
        for cache in ([], ["-ctk", "q8_0", "-ctv", "q8_0"])
    )
    assert quantized > 1.1 * plain


def test_what_does_not_fit_has_no_rate(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "estimate", "llama-3-70b", "--machine", "rtx-4090")
    assert (found["decode_tps"], found["decode_tps_reason"]) == (None, "it does not fit")
