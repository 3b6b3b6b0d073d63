"""Options and files at the edge of sense: what `uma estimate` refuses, and what it survives."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")

from uma.architecture import architecture_from_config
from uma.catalog import find_model, model_config
from uma.cli import main
from uma.errors import CheckpointError
from uma.report.estimate import BAR_WIDTH

CARD, MAC = ("--machine", "rtx-4090"), ("--machine", "mac-mini-m4-16")


def llama(**other: Any) -> dict[str, Any]:
    row = find_model("meta-llama/Meta-Llama-3-8B-Instruct")
    assert row is not None
    return {**model_config(row).values, **other}


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["estimate", "llama-3-8b", *arguments]) == 2
    return capsys.readouterr().err


def longest_line(capsys: pytest.CaptureFixture[str]) -> int:
    lines = capsys.readouterr().out.splitlines()
    return max(len(line) for line in lines if line.startswith("["))


def test_the_bar_of_petabytes_is_no_longer_than_any_other(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["-c", "16777216", "--engine", "vllm", "--batch-size", "1048576"]
    assert main(["estimate", "llama-3-8b", *CARD, *arguments]) == 3
    assert longest_line(capsys) == BAR_WIDTH + 2
    (tmp_path / "config.json").write_text(json.dumps(llama(hidden_size=1_000_000_000)))
    assert main(["estimate", str(tmp_path), *CARD]) == 3
    assert longest_line(capsys) == BAR_WIDTH + 2


@pytest.mark.parametrize(
    "key",
    [
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "rms_norm_eps",
    ],
)
def test_true_is_no_size(key: str) -> None:
    with pytest.raises(CheckpointError):
        architecture_from_config(llama(**{key: True}))


@pytest.mark.parametrize(
    "arguments",
    [CARD, MAC, (*CARD, "--train", "lora"), (*MAC, "--train", "lora")]
    + [(*CARD, "--engine", engine) for engine in ("transformers", "vllm")],
)
def test_no_bits_at_all_are_not_the_usual_ones(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    assert "--bits 0" in refused(capsys, *arguments, "--bits", "0")


@pytest.mark.parametrize(
    ("quant", "owner", "bits"),
    [("Q4_K_M", "llama.cpp", 4), ("iq2_xxs", "llama.cpp", 2), ("int8", "transformers", 8)],
)
def test_another_engines_name_of_a_format_is_refused_under_mlx(
    capsys: pytest.CaptureFixture[str], quant: str, owner: str, bits: int
) -> None:
    told = refused(capsys, *MAC, "--quant", quant)
    assert f"a format of {owner} (--engine {owner}); mlx has its own: --bits {bits}" in told
    assert main(["estimate", "llama-3-8b", *MAC, "--quant", f"{bits}bit"]) in (0, 3)


def test_mxfp4_packs_nothing_of_a_dense_model_which_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """transformers 5.24.0, integrations/mxfp4.py, replaces the experts of gpt-oss alone."""

    def told(model: str) -> str:
        main(["estimate", model, *CARD, "--engine", "transformers", "--quant", "mxfp4"])
        return capsys.readouterr().out

    assert "its weights stay in 16 bits" in told("llama-3-8b")
    assert "best format: bf16" in told("llama-3-8b")
    assert "its weights stay in 16 bits" not in told("gpt-oss-20b")


def test_llama_cpp_has_no_more_sequences_by_either_option(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "at most 256 sequences" in refused(capsys, *CARD, "--batch-size", "257")
    assert main(["estimate", "llama-3-8b", *CARD, "--batch-size", "256"]) in (0, 3)


def test_requests_are_told_as_they_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    for text, shown in (("0+0x0", "0+0x0 must"), ("9000+1", "9000+1x1 is longer")):
        told = refused(capsys, *CARD, "--engine", "vllm", "--requests", text)
        assert f"uma: {shown}" in told


def test_a_count_of_cards_that_no_machine_holds_is_told_as_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "at most 999 cards" in refused(capsys, "--machine", "99999999999xh100")


@pytest.mark.skipif(os.name != "posix", reason="pipes of POSIX")
@pytest.mark.parametrize(
    ("arguments", "unbuffered", "code"),
    [
        (("machines",), "", 0),
        (("machines",), "1", 0),
        (("estimate", "llama-3-8b", *CARD), "", 0),
        (("estimate", "llama-3-8b", *CARD), "1", 0),
        (("estimate", "grok-1", *MAC), "", 3),  # it had ended when the pipe was found closed
    ],
)
def test_a_reader_that_has_read_enough_is_no_failure(
    arguments: tuple[str, ...], unbuffered: str, code: int
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "uma", *arguments]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=environment)
    os.close(writer)
    assert (done.returncode, done.stderr) == (code, b"")
