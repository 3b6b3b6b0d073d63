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

pytest.importorskip("altair", reason="the extra report is not installed")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

MACHINES = ("mac-studio-m4-max-64", "mac-studio-m3-ultra-256")
MODELS = ("llama-3.1-8b", "qwen3-30b-a3b")
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
SYSTEMS = ("chromium", "chromium-browser", "google-chrome")


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
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    machines = [word for name in MACHINES for word in ("--machine", name)]
    models = [word for name in MODELS for word in ("-m", name)]
    assert main(["report", *machines, *models, "-o", str(path)]) == 0
    return path


class Opened:
    """A page that has been drawn, with what it said and asked for meanwhile."""

    def __init__(self, browser: Any, file: Path, **options: Any) -> None:
        context = browser.new_context(**{"viewport": DESKTOP, **options})
        self.page = context.new_page()
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda said: self._heard(said.type, said.text))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("dialog", lambda dialog: self.errors.append(f"dialog {dialog.message}"))
        self.page.goto(file.as_uri())
        self.page.wait_for_selector("#plot-one svg")

    def _heard(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.errors.append(text)

    def picture(self, plot: str) -> str:
        return str(self.page.inner_html(f"#plot-{plot}"))

    def choose(self, **values: str) -> None:
        for name, value in values.items():
            self.page.select_option(f"#{name.replace('_', '-')}", value)


@pytest.fixture
def opened(browser: Any, file: Path) -> Iterator[Opened]:
    found = Opened(browser, file)
    yield found
    found.page.context.close()


def estimate(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    main(["estimate", *words, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_page_asks_nothing_of_the_network_and_reports_no_error(
    opened: Opened, file: Path
) -> None:
    assert opened.requests == [file.as_uri()]
    assert opened.errors == []


@pytest.mark.parametrize(
    ("machine", "model", "bits", "kv", "batch", "context"),
    [
        (0, 0, "4", "16", "1", "8192"),
        (0, 1, "8", "16", "4", "32768"),
        (1, 0, "16", "8", "1", "131072"),
        (1, 1, "6", "4", "1", "16384"),
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
    words = [MODELS[model], "--machine", MACHINES[machine], "--bits", bits, "-c", context]
    cache = [] if kv == "16" else ["--kv-bits", kv]
    said = estimate(capsys, *words, "--batch-size", batch, *cache)
    verdict = opened.page.locator("#one-verdict")
    assert int(verdict.get_attribute("data-total")) == said["total_bytes"]
    assert str(verdict.inner_text()).startswith(said["verdict"])
    shown = opened.page.locator("#one-terms tbody th").all_inner_texts()
    assert set(shown) <= {term["name"] for term in said["terms"]}


def test_every_choice_redraws_the_plot_of_the_model(opened: Opened) -> None:
    seen = [opened.picture("one")]
    for choice in ({"one_bits": "8"}, {"one_batch": "4"}, {"one_model": "1"}, {"one_machine": "1"}):
        opened.choose(**choice)
        opened.page.wait_for_function(
            "before => document.querySelector('#plot-one').innerHTML !== before", arg=seen[-1]
        )
        seen.append(opened.picture("one"))


def test_a_raised_limit_turns_what_exceeds_into_what_fits(opened: Opened) -> None:
    """Verdicts of the slider are those that the estimator gave for each limit."""
    limit = opened.page.locator("#map-limit")
    last = limit.get_attribute("max")
    before = opened.page.locator("#map-table td.v-fits").count()
    limit.fill(last)
    assert opened.page.locator("#map-table td.v-fits").count() > before
    assert "iogpu.wired_limit_mb=" in opened.page.inner_text("#map-limit-text")


def test_a_name_filters_the_map(opened: Opened) -> None:
    opened.page.fill("#map-name", "llama-3.1-8b")
    rows = opened.page.locator("#map-table tbody th").all_inner_texts()
    assert rows
    assert all("llama-3.1-8b" in row for row in rows)


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_the_screen_and_the_colours_follow_it(
    browser: Any, file: Path, viewport: dict[str, int], scheme: str
) -> None:
    opened = Opened(browser, file, viewport=viewport, color_scheme=scheme)
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    page_colour = "getComputedStyle(document.documentElement).backgroundColor"
    if opened.page.evaluate(page_colour) == "rgba(0, 0, 0, 0)":
        page_colour = "getComputedStyle(document.body).backgroundColor"
    red = int(re.findall(r"\d+", opened.page.evaluate(page_colour))[0])
    assert (red > 128) == (scheme == "light")
    opened.page.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser: Any, file: Path, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    opened = Opened(browser, file, color_scheme=scheme)
    found = axe.Axe().run(opened.page).response["violations"]
    serious = [
        (one["id"], one["nodes"][0]["html"])
        for one in found
        if one["impact"] in ("serious", "critical")
    ]
    opened.page.context.close()
    assert serious == []


def test_all_controls_are_reached_by_the_keyboard(opened: Opened) -> None:
    controls = set(
        opened.page.evaluate("[...document.querySelectorAll('select, input')].map(e => e.id)")
    )
    reached = set()
    for _ in range(60):
        opened.page.keyboard.press("Tab")
        reached.add(opened.page.evaluate("document.activeElement.id"))
    assert controls <= reached


def test_it_prints(opened: Opened) -> None:
    assert opened.page.pdf().startswith(b"%PDF")


def test_a_hostile_name_is_shown_as_text(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder may have any name; markup in it is shown and does nothing."""
    from published import config_of

    name = "<img src=x onerror=alert(1)>'\"&lt;"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of("llama-3-8b")))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "report.html"
    words = ["report", "--machine", MACHINES[0], "-m", f"./{name}", "-o", str(path)]
    assert main(words) == 0
    opened = Opened(browser, path)
    assert opened.errors == []
    assert opened.page.locator("img").count() == 0
    assert name in opened.page.inner_text("body")
    opened.page.context.close()
