"""`uma report` as a command: its documents, files, fleets, and what it refuses."""

import json
import os
import re
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")

from uma.cli import main
from uma.measurement.bundle import KIND as BUNDLE
from uma.records import read_records, write_record
from uma.report.capacity.runs import measured_rows

MACHINE = "macbook-air-m4-16"
SMALL = ["report", "--machine", MACHINE, "-m", "qwen3-0.6b", "--filter", "gemma-3-1b", "-c", "8192"]
HOSTILE = "<img src=x onerror=alert(1)>`|*[a](b)"
FIXTURE = Path(__file__).parent / "data" / "machines" / "amd_epyc_24g.json"


def run(*words: object, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "uma", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **variables},
    )


def bundle(readings: object, **more: object) -> str:
    return json.dumps({"kind": BUNDLE, "date": "2026-11-30", "readings": readings, **more})


@cache
def shown(form: str, seed: str = "1", epoch: str = "1796000000") -> str:
    done = run(*SMALL, "--format", form, PYTHONHASHSEED=seed, SOURCE_DATE_EPOCH=epoch)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def quick(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A report without models in detail, which are most of the work."""
    names = tmp_path_factory.mktemp("fleet") / "names.txt"
    names.write_text(MACHINE)
    return ["report", "--fleet", str(names), "--filter", "gemma-3-1b"]


@cache
def fixture_readings() -> Any:
    return json.loads(FIXTURE.read_text(encoding="utf-8"))["readings"]


class Page(HTMLParser):
    """What a browser would make of a page: its elements, and the text outside scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1][0] not in ("script", "style"):
            self.text += data


def keys(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value) | set().union(*map(keys, value.values()))
    return set().union(*map(keys, value)) if isinstance(value, list) else set()


@pytest.mark.parametrize("form", ["json", "html"])
def test_the_same_report_twice_is_the_same_to_the_byte_apart_from_its_date(form: str) -> None:
    if form == "html":
        pytest.importorskip("altair")
        pytest.importorskip("vl_convert")
    first, second = shown(form), shown(form, seed="2", epoch="1896000000")
    assert "2030-01-30" in second
    assert first == second.replace("2030-01-30", "2026-11-30")


def test_every_key_of_the_json_is_told_in_the_documentation() -> None:
    text = (Path(__file__).parents[1] / "docs" / "report.md").read_text(encoding="utf-8")
    told = set(re.findall(r"[a-z][a-z0-9_]+", text))
    found = keys(json.loads(shown("json")))
    assert {key for key in found if not re.search(r"_tps(_low|_high|_reason)?$", key)} <= told


def test_markdown_shows_the_numbers_of_the_json() -> None:
    (machine,) = json.loads(shown("json"))["machines"]
    text = shown("md")
    for line in machine["budget"]["lines"]:
        assert f"{line['size_bytes'] / 2**30:,.2f} GiB" in text
    for row in machine["rows"]:
        for cell in row["cells"]:
            at = cell["at"][0]
            assert f"{at['verdict']} {at['total_bytes'] / 2**30:.1f}" in text


def test_the_page_needs_no_network_and_has_each_section() -> None:
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    page = Page(shown("html"))
    for tag, attributes in page.elements:
        for name in ("src", "href", "data", "action", "srcset"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:,")), (tag, value)
    headings = {attributes.get("id") for tag, attributes in page.elements if tag == "section"}
    assert headings >= {
        *("summary", "budget", "map", "model", "speed", "sequences"),
        *("training", "plans", "measured", "method"),
    }


def test_each_plot_is_made_as_a_picture() -> None:
    pytest.importorskip("vl_convert")
    pytest.importorskip("altair")
    from uma.report.capacity.plots import pictures

    found = json.loads(shown("json"))
    assert set(pictures(found, "svg")) >= {"map", "budget", "plans", "training"}
    assert all(content.startswith(b"\x89PNG") for content in pictures(found, "png").values())


def test_hostile_names_of_machines_are_text_in_the_page_and_in_markdown(tmp_path: Path) -> None:
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    for name in (HOSTILE, "b\x1b[31m\u202e"):
        (tmp_path / f"{name}.json").write_text(bundle(fixture_readings()), encoding="utf-8")
    words = ["report", "--fleet", tmp_path, "--filter", "gemma-3-1b", "--format"]
    done = run(*words, "html")
    assert done.returncode == 0, done.stderr
    page = Page(done.stdout)
    assert not [tag for tag, attributes in page.elements if "onerror" in attributes or tag == "img"]
    assert HOSTILE in page.text
    assert "\x1b" not in done.stdout
    assert "\u202e" not in done.stdout
    text = run(*words, "md").stdout
    assert "<img" not in text
    assert "\\[a\\]" in text
    assert "\x1b" not in text


def test_hostile_names_of_models_end_no_script_and_no_attribute() -> None:
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    from uma.report.capacity.markdown import markdown
    from uma.report.capacity.page import page

    hostile = "</script ><b onclick='x'>\"'<!--" + HOSTILE
    found = json.loads(shown("json").replace("qwen3-0.6b", json.dumps(hostile)[1:-1]))
    html = page(found)
    made = Page(html)
    scripts = [attributes for tag, attributes in made.elements if tag == "script"]
    assert len(scripts) == len([tag for tag, _ in Page(shown("html")).elements if tag == "script"])
    tags = {tag for tag, attributes in made.elements if "onclick" in attributes}
    assert not tags | ({tag for tag, _ in made.elements} & {"b", "img"})
    assert hostile in made.text
    ends = r'(?is)<script type="application/json"[^>]*>(.*?)</script'  # as a browser finds the end
    told = [json.loads(text) for text in re.findall(ends, html)]
    assert told
    assert hostile in json.dumps(told, ensure_ascii=False).replace('\\"', '"')
    assert "<b" not in markdown(found)


def test_a_file_that_exists_is_replaced_only_with_force(
    quick: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.md"
    file.write_text("mine")
    assert main([*quick, "-o", str(file)]) == 2
    assert "--force" in capsys.readouterr().err
    assert file.read_text() == "mine"
    assert main([*quick, "-o", str(file), "--force"]) == 0
    assert file.read_text(encoding="utf-8").startswith("# What MacBook Air")
    assert [path.name for path in tmp_path.iterdir()] == ["report.md"]


def test_a_folder_that_cannot_be_written_leaves_nothing_behind(
    quick: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*quick, "-o", str(tmp_path / "none" / "report.md")]) == 1
    assert "cannot be written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-o", "report.pdf"], "names no format"),
        (["--json", "--format", "md"], "two documents"),
        (["--since", "2026-13-01"], "is no day"),
        (["--since", "yesterday"], "is no day"),
        (["--fleet", "nowhere"], "leave out --machine"),
        (["--decision", "-m", "qwen3-8b"], "one model"),
        (["--diff", "nowhere.json"], "cannot be read"),
    ],
)
def test_what_is_refused_is_said(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, *words]) in (1, 2)
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"kind": "uma capacity report", "schema_version": 1}', "[" * 100_000, "\x00"],
)
def test_an_old_report_that_is_none_is_refused_without_a_traceback(
    text: str, quick: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = tmp_path / "old.json"
    old.write_text(text)
    assert main([*quick, "--diff", str(old)]) == 1
    assert f"--diff {old}" in capsys.readouterr().err


def test_diff_tells_what_changed_since_the_old_report(
    quick: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = tmp_path / "old.json"
    assert main([*quick, "--reserve", "12GiB", "--format", "json", "-o", str(old)]) == 0
    assert main([*quick, "--diff", str(old), "--json"]) == 0
    changes = json.loads(capsys.readouterr().out)["changes"]
    assert f"{MACHINE}: the budget was 4.00 GiB, is 8.00 GiB" in changes["texts"]


@pytest.mark.parametrize(
    "text",
    [
        "no json",
        json.dumps({"kind": "something"}),
        bundle({"system": "darwin"}),
        bundle({"system": "darwin", "sysctl": "text", "vm_stat": 5, "ioreg": None}),
        bundle({"system": "linux", "meminfo": [], "cpuinfo": [], "release": [], "groups": [3]}),
        bundle(None),
    ],
)
def test_a_bundle_that_is_none_is_refused_by_its_name(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.json").write_text(text)
    assert main(["report", "--fleet", str(tmp_path), "--filter", "gemma-3-1b"]) == 1
    assert "one.json" in capsys.readouterr().err


def test_a_bundle_larger_than_any_is_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open(tmp_path / "one.json", "wb") as file:
        file.truncate(1 << 30)
    assert main(["report", "--fleet", str(tmp_path)]) == 1
    assert "larger than any bundle" in capsys.readouterr().err


def test_a_fleet_is_bundles_and_lists_of_names_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "server.json").write_text(bundle(fixture_readings()))
    (tmp_path / "macs.txt").write_text("mac-mini-m4-16  # Ann's\n\nmac-studio-m4-max-128\n")
    assert main(["report", "--fleet", str(tmp_path), "--filter", "gemma-3-1b", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = [machine["name"] for machine in found["machines"]]
    assert names == ["mac-mini-m4-16", "mac-studio-m4-max-128", "server"]
    server = found["machines"][2]
    assert server["budget"]["memory_bytes"] == 24_683_652 * 1024
    assert main(["report", "--fleet", str(tmp_path / "macs.txt"), "--filter", "gemma-3-1b"]) == 0
    assert "Side by side" in capsys.readouterr().out


def test_measured_runs_stand_beside_their_predictions(tmp_path: Path) -> None:
    record = {
        "command": "run",
        "model": {"name": "smollm2-135m"},
        "machine": {"name": "here"},
        "ledger": {"predicted_peak_bytes": 1_050, "measured_peak_bytes": 1_000, "terms": []},
        "speeds": {"generation_tps": 12.5},
        "settings": {"context_tokens": 8192, "kv_bits": None, "form": "float32"},
    }
    assert write_record(record, tmp_path).note is None
    unmeasured = {**record, "ledger": {"predicted_peak_bytes": 5, "measured_peak_bytes": None}}
    assert write_record(unmeasured, tmp_path).note is None
    (row,) = measured_rows(read_records(tmp_path))
    assert (row["model"], row["error"], row["generation_tps"]) == ("smollm2-135m", 0.05, 12.5)
    # Case D13: a published column mixed two instruments and settings, and could not be compared.
    assert row["settings"] == {"context_tokens": 8192, "form": "float32"}
    assert "mx.get_peak_memory" in row["instrument"]
    assert list(measured_rows(read_records(tmp_path), "2999-01-01")) == []


def test_new_models_since_a_day_are_told(
    quick: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*quick, "--since", "2025-01-01", "--json"]) == 0
    (text,) = json.loads(capsys.readouterr().out)["changes"]["texts"]
    assert "gemma-3-1b" in text


def test_the_decision_page_is_one_document_in_three_forms(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["report", "qwen3-8b", "--decision", "--machine", MACHINE, "--machine", "rtx-4090"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["plan"]["machine"] for row in found["rows"]] == [MACHINE, "rtx-4090"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert found["why"].partition(";")[0] in text
    pytest.importorskip("jinja2")
    assert main([*words, "--format", "html"]) == 0
    page = Page(capsys.readouterr().out)
    assert found["question"] in page.text
    assert "script" not in [tag for tag, _ in page.elements]


def test_without_the_extra_markdown_works_and_html_says_what_to_install(quick: list[str]) -> None:
    code = (
        "import sys; sys.modules |= dict.fromkeys(('altair', 'vl_convert', 'jinja2'))\n"
        "from uma.cli import main\n"
        f"assert main({quick!r}) == 0\n"
        f"sys.exit(main([*{quick!r}, '--format', 'html']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "uma-toolkit[report]" in done.stderr
    assert "Traceback" not in done.stderr
