"""The analysis page in a real browser: drawn whole, quiet, alone, usable by hand and by ear."""

from __future__ import annotations

import html.parser
import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from padless.analysis import analyze_lengths
from padless.analysis.page import render, write_html
from support.browser import browser, console_errors, requests

pytest.importorskip("plotly")

PLOTS = ("histogram", "times", "occupancy", "rectangles", "timeline", "sweep-occupancy", "sweep-microbatches")


def analysis() -> Any:
    lengths = np.random.default_rng(0).lognormal(6, 0.8, size=600).clip(8, 4096).astype(np.int64)
    return analyze_lengths(lengths, token_budget=8192, ranks=4, sequences_per_step=64)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_html(analysis(), path, title='data "A" & </script><b>B</b>.jsonl')
    return path


def open_page(driver: Any, page: Path) -> None:
    driver.get(page.as_uri())
    until = time.monotonic() + 30
    while driver.execute_script("return document.documentElement.dataset.ready") != "yes":
        assert time.monotonic() < until, console_errors(driver)
        time.sleep(0.1)


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_everything_is_drawn_and_nothing_is_fetched(page: Path, tmp_path: Path, width: int, dark: bool) -> None:
    with browser(tmp_path / "profile", width=width, dark=dark) as driver:
        open_page(driver, page)
        for plot in PLOTS:
            marks = f"return document.querySelectorAll('#{plot} .trace, #{plot} .point').length"
            assert driver.execute_script(marks) > 0, plot
            box = driver.execute_script(
                f"return document.querySelector('#{plot} svg').getBoundingClientRect().toJSON()"
            )
            assert 200 < box["width"] <= width
            assert box["height"] > 150
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width, "no sideways scrolling"
        background = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 200) == dark
        choose_every_strategy(driver)
        move_the_slider(driver)
        switch_the_theme(driver, background)
        assert console_errors(driver) == []
        assert [url for url in requests(driver) if not url.startswith("data:")] == [page.as_uri()]


def choose_every_strategy(driver: Any) -> None:
    from selenium.webdriver.support.select import Select

    select = Select(driver.find_element("id", "strategy"))
    told = set()
    for option in [o.text for o in select.options]:
        select.select_by_visible_text(option)
        text = driver.find_element("id", "step-text").text
        assert text.startswith(option)
        told.add(text)
        assert driver.execute_script("return document.querySelectorAll('#rectangles .point').length") > 0
    assert len(told) == len(select.options)


def move_the_slider(driver: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    slider = driver.find_element("id", "budget")
    before = driver.find_element("id", "budget-text").text
    marker = "return document.getElementById('sweep-occupancy').layout.shapes[0].x0"
    at = driver.execute_script(marker)
    slider.send_keys(Keys.ARROW_RIGHT)  # by keyboard, as everyone can
    after = driver.find_element("id", "budget-text").text
    assert before != after
    assert "occupancy" not in after
    assert "step-balanced" in after
    assert driver.execute_script(marker) > at
    assert slider.get_attribute("aria-valuetext").endswith("tokens")


def switch_the_theme(driver: Any, before: str) -> None:
    driver.find_element("id", "theme").click()
    assert driver.execute_script("return getComputedStyle(document.body).backgroundColor") != before


class Outline(html.parser.HTMLParser):
    """Elements with their attributes, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_page_can_be_read_without_seeing_it() -> None:
    text = render(analysis())
    outline = Outline()
    outline.feed(text)
    attributes = [attrs for _, attrs in outline.found]
    assert ("html", {"lang": "en"}) in outline.found
    plots = [a for a in attributes if "plot" in (a.get("class") or "").split()]
    assert len(plots) == len(PLOTS)
    assert all(a["role"] == "img" and a["aria-label"] for a in plots)
    inputs = {a.get("id") for tag, a in outline.found if tag in ("input", "select")}
    labelled = {a.get("for") for tag, a in outline.found if tag == "label"}
    assert inputs == labelled
    assert sum(tag == "h1" for tag, _ in outline.found) == 1
    assert sum(tag == "table" for tag, _ in outline.found) == 2  # every figure that a plot shows
    assert any(a.get("aria-live") == "polite" for a in attributes)


def test_the_page_names_no_address_that_it_could_fetch() -> None:
    outline = Outline()
    outline.feed(render(analysis()))
    for tag, attrs in outline.found:
        for name in ("src", "href", "action"):
            target = attrs.get(name)
            assert target is None or target.startswith(("#", "data:")), (tag, target)


def test_text_from_the_data_is_text_on_the_page(page: Path) -> None:
    text = page.read_text()
    assert "</script><b>" not in text
    assert "data &quot;A&quot; &amp; &lt;/script&gt;&lt;b&gt;B&lt;/b&gt;.jsonl" in text
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert block is not None
    payload = json.loads(block.group(1))
    assert payload["setup"]["token_budget"] in payload["sweep"]["budgets"]
