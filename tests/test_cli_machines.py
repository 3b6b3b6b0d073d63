"""`uma machines` and `uma models`: tables, filters, JSON."""

import json

import pytest

from uma.catalog import model_config, models
from uma.catalog.listed import listed_models
from uma.cli import main
from uma.machine.listed import listed_machines
from uma.machine.named import machine_named
from uma.units import GIB

pytest.importorskip("typer")


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_machines_are_a_table_with_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "machines", "studio", "--min-memory", "256GB").splitlines()
    assert lines[0].split() == ["name", "memory", "for", "the", "GPU", "GB/s", "US$"]
    names = [line.split()[0] for line in lines[1:]]
    assert names == [
        "mac-studio-m3-ultra-256", "mac-studio-m3-ultra-512",
        "mac-studio-m5-ultra-256", "mac-studio-m5-ultra-512",
    ]  # fmt: skip


def test_few_machines_are_shown_with_what_is_known_of_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = said(capsys, "machines", "gh200")
    assert "second tier: 480.00 GiB" in out
    assert "link: 450.0 GB/s" in out


def test_kind_chip_and_memory_filter_machines() -> None:
    assert {one.kind for one in listed_machines(kind="gpu")} == {"gpu"}
    assert all(" M4 Max" in one.machine.name for one in listed_machines(chip="m4 max"))
    assert {one.memory_gib for one in listed_machines(chip="M4 Max")} == {36, 48, 64, 128}
    assert min(one.memory_gib for one in listed_machines(min_memory_bytes=96 * GIB)) == 96
    assert listed_machines("no such thing") == []


def test_a_listed_machine_is_the_one_that_its_name_means() -> None:
    listed = [one for one in listed_machines() if one.machine is not None]
    assert len(listed) > 200
    for one in listed:
        assert one.machine == machine_named(one.name), one.name


def test_machines_as_json_have_bytes_and_null_with_a_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    document = json.loads(said(capsys, "machines", "--json", "--kind", "unified"))
    assert document["schema_version"] == 1
    by_name = {one["name"]: one for one in document["machines"]}
    assert by_name["gh200"]["machine"]["host_memory_bytes"] == 480 * GIB
    assert by_name["snapdragon-x2-elite"]["machine"] is None
    assert by_name["snapdragon-x2-elite"]["reason"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("machines", "--kind", "phone"),
        ("machines", "--min-memory", "96"),
        ("models", "--kind", "phone"),
        ("models", "--max-parameters", "70"),
    ],
)
def test_a_filter_that_cannot_be_is_a_usage_error(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("uma: --")


def test_nothing_found_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "machines", "zzz") == "no machine of the catalog is like that\n"
    assert said(capsys, "models", "zzz") == "no model of the catalog is like that\n"


def test_models_are_listed_smallest_first(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "models", "qwen3", "--max-parameters", "4B").splitlines()
    assert lines[0].split() == ["name", "parameters", "active", "context", "kind"]
    assert [line.split()[0] for line in lines[1:3]] == ["qwen3-0.6b", "qwen3-1.7b"]
    assert all(line.startswith("qwen3") for line in lines[1:])


def test_every_model_is_listed_once() -> None:
    listed = listed_models()
    assert sorted(one.hf_id for one in listed) == sorted(model.hf_id for model in models())
    sizes = [one.parameters for one in listed if one.parameters is not None]
    assert sizes == sorted(sizes)


def test_kind_and_context_are_those_of_the_architecture() -> None:
    from uma.architecture import architecture_from_config
    from uma.architecture.layers import Experts

    by_id = {one.hf_id: one for one in listed_models()}
    for model in models():
        architecture = architecture_from_config(model_config(model).values)
        experts = any(
            isinstance(part, Experts)
            for layer in architecture.layers
            for part in layer.feed_forward
        )
        listed = by_id[model.hf_id]
        assert listed.kind == ("moe" if experts else "dense"), model.hf_id
        if None not in (listed.context_tokens, architecture.max_position_embeddings):
            assert listed.context_tokens == architecture.max_position_embeddings, model.hf_id


def test_published_sizes_are_those_shown() -> None:
    """What the makers print: 671B with 37B active, 30.5B with 3.3B, 70.6B."""
    by_name = {one.name: one for one in listed_models()}
    assert by_name["deepseek-v3"].parameters == pytest.approx(671e9, rel=0.001)
    assert by_name["qwen3-30b-a3b"].parameters == pytest.approx(30.5e9, rel=0.005)
    assert by_name["llama-3-70b"].parameters == pytest.approx(70.6e9, rel=0.001)
    assert by_name["llama-3-70b"].context_tokens == 8192


def test_models_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(said(capsys, "models", "--kind", "moe", "--json"))
    assert {one["kind"] for one in document["models"]} == {"moe"}
    assert all(isinstance(one["parameters"], int | None) for one in document["models"])
