"""The page of ``uma report`` in a real Chromium: what it shows and what it asks of the network.

Skipped where there is no Chromium, which ``playwright install --with-deps chromium`` brings.
"""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from uma.cli import main
from uma.report.capacity.page import page as page_of
from uma.report.capacity.plot_rows import sizes_of
from uma.units import GIB, format_gib

pytest.importorskip("altair", reason="the extra report is not installed")
pytest.importorskip("vl_convert", reason="the extra report is not installed")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

MACHINES = ("macbook-air-m4-16", "mac-studio-m4-max-64")
MODELS = ("qwen3-0.6b", "gpt-oss-20b")
STORED = ("gpt-oss-20b",)  # in the bits that are chosen: --bits would quantize it anew
CONTEXT = 8192
CARD = "2xrtx-3090"
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
SYSTEMS = ("chromium", "chromium-browser", "google-chrome")
HOSTILE = "<img src=x onerror=alert(1)>'\"&lt;</script>\u202e"
MOST_BYTES = 3_000_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        own = Path(started.chromium.executable_path)
        path = own if own.exists() else next(filter(None, map(shutil.which, SYSTEMS)), None)
        if path is None:
            pytest.skip("no Chromium is installed")
        found = started.chromium.launch(executable_path=path)
        yield found
        found.close()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The document of a small report."""
    path = tmp_path_factory.mktemp("report") / "report.json"
    machines = [word for name in MACHINES for word in ("--machine", name)]
    models = [word for name in MODELS for word in ("-m", name)]
    words = ["report", *machines, *models, "--filter", "qwen3", "-c", str(CONTEXT)]
    assert main([*words, "-o", str(path)]) == 0
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return report


class Opened:
    """A page that has been drawn, with what it said and asked for meanwhile."""

    def __init__(self, browser: Any, file: Path, drawn: str = "#plot-one svg") -> None:
        self.page = browser.new_page(viewport=DESKTOP)
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda said: self._heard(said.type, said.text))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("dialog", lambda dialog: self.errors.append(f"dialog {dialog.message}"))
        self.page.goto(file.as_uri())
        self.page.wait_for_selector(drawn)

    def _heard(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.errors.append(text)

    def choose(self, **values: str) -> None:
        for name, value in values.items():
            self.page.select_option(f"#{name.replace('_', '-')}", value)

    def redrawn(self, plot: str, by: Any) -> None:
        """Do ``by``, and wait until the plot is another than before; fails where it stays."""
        before = self.page.inner_html(f"#plot-{plot}")
        by()
        changed = f"before => document.querySelector('#plot-{plot}').innerHTML !== before"
        self.page.wait_for_function(changed, arg=before, timeout=10_000)


@pytest.fixture(scope="module")
def shared(browser: Any, found: Any, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    file = tmp_path_factory.mktemp("page") / "report.html"
    file.write_text(page_of(found), encoding="utf-8")
    return Opened(browser, file)


@pytest.fixture
def opened(shared: Opened) -> Iterator[Opened]:
    """The page of the module, which no test may leave with an error or a request."""
    yield shared
    shared.page.emulate_media(color_scheme="light", media="screen")
    shared.page.set_viewport_size(DESKTOP)
    assert shared.errors == []
    assert len(shared.requests) == 1


def estimate(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    main(["estimate", *words, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_page_asks_nothing_of_the_network_and_reports_no_error(opened: Opened) -> None:
    assert [url.partition(":")[0] for url in opened.requests] == ["file"]
    opened.page.wait_for_function("document.querySelectorAll('.plot svg').length === 6")
    assert opened.errors == []


@pytest.mark.parametrize(
    ("machine", "model", "bits", "kv", "batch", "context"),
    [
        (0, 0, "8", "8", "1", "16384"),
        (1, 0, "6", "4", "4", "4096"),
        (1, 1, "4", "16", "16", "32768"),
    ],
)
def test_a_choice_shows_what_the_estimate_of_the_same_choice_says(
    opened: Opened,
    capsys: pytest.CaptureFixture[str],
    machine: int,
    model: int,
    bits: str,
    kv: str,
    batch: str,
    context: str,
) -> None:
    opened.choose(one_machine=str(machine), one_model=str(model))
    opened.choose(one_bits=bits, one_kv=kv, one_batch=batch, one_context=context)
    words = [MODELS[model], "--machine", MACHINES[machine], "-c", context, "--batch-size", batch]
    words += [] if MODELS[model] in STORED else ["--bits", bits]
    words += [] if kv == "16" else ["--kv-bits", kv]
    said = estimate(capsys, *words)
    verdict = opened.page.locator("#one-verdict")
    assert int(verdict.get_attribute("data-total")) == said["total_bytes"]
    assert str(verdict.inner_text()).startswith(said["verdict"])
    names = opened.page.locator("#one-terms tbody th").all_inner_texts()
    sizes = opened.page.eval_on_selector_all(
        "#one-terms [data-bytes]", "cells => cells.map(cell => Number(cell.dataset.bytes))"
    )
    assert sum(sizes) == said["total_bytes"]
    told = {(term["name"], term["size_bytes"]) for term in said["terms"]}
    assert set(zip(names, sizes, strict=False)) <= told


def test_every_choice_redraws_the_plot_of_the_model(opened: Opened) -> None:
    opened.choose(one_machine="0", one_model="0", one_bits="4")
    for choice in ({"one_bits": "8"}, {"one_batch": "4"}, {"one_machine": "1"}, {"one_model": "1"}):
        opened.redrawn("one", lambda choice=choice: opened.choose(**choice))


def test_a_raised_limit_turns_what_exceeds_into_what_fits(opened: Opened, found: Any) -> None:
    """Verdicts of the slider are those that the estimator gave for each limit."""
    opened.choose(map_machine="1")
    limit = opened.page.locator("#map-limit")
    last = len(found["machines"][1]["budget"]["limits"]) - 1
    assert limit.get_attribute("max") == str(last)
    counts = []
    for place in (0, last):
        limit.fill(str(place))
        expected = [
            one
            for row in found["machines"][1]["rows"]
            for cell in row["cells"]
            for one in cell["at"]
            if one["verdicts"][place] == "fits"
        ]
        counts.append(opened.page.locator("#map-table td.v-fits").count())
        assert counts[-1] == len(expected)
    assert counts[1] > counts[0]
    assert "iogpu.wired_limit_mb=" in opened.page.inner_text("#map-limit-text")
    assert opened.page.input_value("#one-limit") == str(last)
    opened.choose(map_machine="0")


def test_a_name_and_a_kind_filter_the_map_whose_largest_model_is_first(
    opened: Opened, found: Any
) -> None:
    opened.choose(map_verdict="", map_machine="1")
    names = opened.page.locator("#map-table tbody th").all_inner_texts()
    assert len(names) == len(found["machines"][1]["rows"])
    opened.choose(map_verdict="runs", map_kind="moe")
    opened.page.fill("#map-name", "QWEN3-30b")
    rows = opened.page.locator("#map-table tbody th").all_inner_texts()
    assert rows
    assert all("qwen3-30b" in row for row in rows)
    opened.page.fill("#map-name", "")
    opened.choose(map_kind="")
    sizes = sizes_of(found)
    shown = opened.page.locator("#map-table tbody th").all_inner_texts()
    told = [sizes[text.split("\n")[0]] for text in shown]
    assert told == sorted(told, reverse=True)
    for text, parameters in zip(shown, told, strict=True):
        assert float(text.split("\n")[1].rstrip("B")) == pytest.approx(parameters / 1e9, rel=0.05)


def test_arrow_keys_go_through_the_map_and_a_cell_tells_what_the_estimate_says(
    opened: Opened, capsys: pytest.CaptureFixture[str]
) -> None:
    opened.page.focus("#map-table td[tabindex='0']")
    opened.page.keyboard.press("ArrowDown")
    for _ in range(4):
        opened.page.keyboard.press("ArrowRight")
    told = opened.page.inner_text("#map-detail")
    _, _, command = told.partition("uma estimate ")
    assert "--bits 4" in command
    said = estimate(capsys, *command.split())
    weights = sum(t["size_bytes"] for t in said["terms"] if t["name"] == "weights")
    assert f"{said['verdict']}, {format_gib(said['total_bytes'])}" in told
    assert f"weights are {format_gib(weights)}" in told


def test_a_machine_that_is_off_is_in_no_plot_and_no_table(opened: Opened) -> None:
    box = opened.page.locator(f"#shown input[value='{CARD}']")
    row = opened.page.locator(f"#plans tr[data-machine='{CARD}']").first
    bars = opened.page.locator(f"#plot-plans .mark-rect [aria-label*='{CARD}']")
    assert row.is_visible()
    assert bars.count() > 0
    opened.redrawn("plans", box.uncheck)
    assert not row.is_visible()
    assert bars.count() == 0
    opened.redrawn("plans", box.check)
    assert row.is_visible()


def test_a_newcomer_finds_short_answers(opened: Opened, found: Any) -> None:
    text = opened.page.inner_text("#answers")
    for machine in found["machines"]:
        best = machine["best"][0]
        assert f"{best['model']} in {best['format']}" in text
        if machine["budget"]["limits"][-1]["command"]:
            assert machine["budget"]["limits"][-1]["command"] in text
    for row in found["machines"][1]["training"]:
        if row["largest_seq_length"] is not None:
            assert f"rows of up to {row['largest_seq_length']:,} tokens" in text
    assert re.search(rf"{CARD}: .*(faster|slower) for .* against ", text)


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_the_screen_and_the_colours_follow_it(
    opened: Opened, viewport: dict[str, int], scheme: str
) -> None:
    opened.page.emulate_media(color_scheme=scheme)
    opened.page.set_viewport_size(viewport)
    narrow = f"document.documentElement.scrollWidth <= {viewport['width']}"
    opened.page.wait_for_function(narrow, timeout=5_000)
    colour = opened.page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    red = int(re.findall(r"\d+", colour)[0])
    assert colour != "rgba(0, 0, 0, 0)"
    assert (red > 128) == (scheme == "light")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(opened: Opened, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    opened.page.emulate_media(color_scheme=scheme)
    opened.page.fill("#map-name", "qwen3-30b")  # few rows: the others are alike
    violations = axe.Axe().run(opened.page).response["violations"]
    opened.page.fill("#map-name", "")
    serious = [
        (one["id"], one["nodes"][0]["html"])
        for one in violations
        if one["impact"] in ("serious", "critical")
    ]
    assert serious == []


def test_all_controls_are_reached_by_the_keyboard(opened: Opened) -> None:
    controls = set(
        opened.page.evaluate(
            "[...document.querySelectorAll('select, input:not(:disabled)')].map(e => e.id)"
        )
    )
    reached = set()
    opened.page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    for _ in range(90):
        opened.page.keyboard.press("Tab")
        reached.add(opened.page.evaluate("document.activeElement.id"))
    assert controls <= reached


def pages(pdf: bytes) -> int:
    return len(re.findall(rb"/Type\s*/Page\b", pdf))


def test_it_prints_dark_on_light_without_its_controls(opened: Opened) -> None:
    opened.page.emulate_media(color_scheme="dark", media="print")
    colours = opened.page.evaluate(
        "(s => [s.backgroundColor, s.color])(getComputedStyle(document.documentElement))"
    )
    assert colours == ["rgb(255, 255, 255)", "rgb(27, 27, 27)"]
    assert not opened.page.locator(".controls").first.is_visible()
    assert 2 <= pages(opened.page.pdf()) <= 12


RUN = {
    "time": "2026-11-30T10:00:00",
    "command": "run",
    "model": f"ran {HOSTILE}",
    "predicted_peak_bytes": 3 * GIB,
    "measured_peak_bytes": 2 * GIB,
    "error": 0.5,
    "generation_tps": 12.5,
    "terms": [
        {"name": "weights", "phase": "always", "predicted_bytes": GIB, "measured_bytes": None}
    ],
}


@pytest.fixture(scope="module")
def strange(browser: Any, found: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    """A page with a machine, a model and a run of hostile names, and with what changed."""
    text = json.dumps(found)
    for name in (MODELS[0], MACHINES[0]):
        text = text.replace(f'"{name}"', json.dumps(HOSTILE + name))
    report = json.loads(text)
    report["measured"] = {"runs": [RUN], "note": None}
    report["changes"] = {"from": "2026-10-01", "texts": ["the budget was 4.00 GiB"], "rows": []}
    file = tmp_path_factory.mktemp("strange") / "report.html"
    file.write_text(page_of(report), encoding="utf-8")
    opened = Opened(browser, file)
    yield opened
    assert opened.errors == []


def test_hostile_names_are_shown_as_text(strange: Opened) -> None:
    """A folder may have any name; markup in it is shown and does nothing."""
    strange.choose(one_model="0")
    assert strange.page.locator("img").count() == 0
    shown = strange.page.inner_text("body")
    assert HOSTILE.replace("\u202e", "\\u202e") in shown
    assert "\u202e" not in shown
    assert strange.page.locator("#one-machine option").first.inner_text().startswith("<img")
    assert strange.errors == []


def test_measured_runs_stand_with_their_errors_and_terms(strange: Opened) -> None:
    strange.page.click("#measured summary")
    text = strange.page.inner_text("#measured")
    for words in ("3.00 GiB", "2.00 GiB", "+50.0 %", "12.5", "weights (always): 1.00 GiB"):
        assert words in text


def test_what_changed_is_told_where_an_old_report_is_given(strange: Opened) -> None:
    text = strange.page.inner_text("#changes")
    assert "since 2026-10-01" in text
    assert "the budget was 4.00 GiB" in text


def test_three_machines_with_400_models_and_four_in_detail_are_at_most_three_megabytes(
    found: Any,
) -> None:
    (machine, *_), models = found["machines"], found["models"]
    rows, chosen = machine["rows"], max(machine["models"], key=lambda one: len(one["points"]))
    many = range(-(-400 // len(rows)))
    big = {
        **machine,
        "rows": [{**row, "model": f"{row['model']}-{n}"} for n in many for row in rows],
        "models": [{**chosen, "model": f"model-{n}"} for n in range(4)],
    }
    listed = [{**one, "name": f"{one['name']}-{n}"} for n in many for one in models]
    made = page_of({**found, "machines": [big] * 3, "models": listed})
    assert len(made.encode("utf-8")) <= MOST_BYTES


def test_the_decision_is_one_printed_page(
    browser: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "decision.html"
    names = (*MACHINES, "mac-studio-m4-max-128", "rtx-4090", CARD)
    machines = [word for name in names for word in ("--machine", name)]
    assert main(["report", "llama-3.3-70b", "--decision", *machines, "-o", str(path)]) == 0
    opened = Opened(browser, path, "table")
    assert pages(opened.page.pdf()) == 1
    assert pages(opened.page.pdf(format="A4")) == 1
    assert opened.page.locator("tbody tr").count() == len(names)
    assert opened.errors == []
    assert opened.requests == [path.as_uri()]
    opened.page.set_viewport_size(PHONE)
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    opened.page.close()
