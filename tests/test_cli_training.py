"""``uma estimate --train``: text, JSON, exit codes."""

import json

import pytest


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_prints_terms_and_leaves_3_where_it_does_not_fit(
    as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    from uma.cli import main

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
    assert found["binding_phase"] == "optimizer"
    assert found["trainable_parameters"] == 70553706496


def test_an_option_of_training_without_train_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from uma.cli import main

    assert main(["estimate", "llama-3-8b", "--machine", "rtx-4090", "--rank", "8"]) == 2
    assert "--train" in capsys.readouterr().err
