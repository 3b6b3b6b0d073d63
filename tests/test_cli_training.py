"""``uma estimate --train``: text, JSON, exit codes."""

import json

import pytest

from uma.cli import main


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_prints_terms_and_leaves_3_where_it_does_not_fit(
    as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["estimate", "llama-3-70b", "--train", "full", "--machine", "rtx-4090"]
    code = main([*arguments, *(["--json"] if as_json else [])])
    out = capsys.readouterr().out
    assert code == 3
    if not as_json:
        assert "exceeds" in out
        assert "optimizer_states" in out
        return
    found = json.loads(out)
    assert found["verdict"] == "exceeds"
    assert found["total_bytes"] == max(found["phases"].values())
    assert found["binding_phase"] == "backward"
    assert found["trainable_parameters"] == 70553706496


def test_an_option_of_training_without_train_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["estimate", "llama-3-8b", "--machine", "rtx-4090", "--rank", "8"]) == 2
    assert "--train" in capsys.readouterr().err


LONG = ["llama-3-8b", "--train", "lora", "--machine", "rtx-4090", "--num-layers", "-1"]
LONG += ["--batch-size", "1", "--max-seq-length", "4096", "--grad-checkpoint"]


@pytest.mark.parametrize("as_json", [False, True])
def test_what_only_torchs_pool_has_no_room_for_is_tight(
    as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch 2.13 gives freed blocks back before it is out of memory."""
    assert main(["estimate", *LONG, *["--json"] * as_json]) == 0
    printed = capsys.readouterr().out
    assert "torch's pool of freed blocks has no room" in printed
    if not as_json:
        assert "\ntight: " in printed
        return
    found = json.loads(printed)
    assert found["verdict"] == "tight"
    sizes = {term["name"]: term["size_bytes"] for term in found["terms"]}
    without_pool = found["total_bytes"] - sizes["buffer_pool"]
    assert without_pool <= found["limit_bytes"] < found["total_bytes"]
