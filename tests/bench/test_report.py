"""The HTML report: one file, no script, no request, complete, and drawn in a real browser."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from padless import PadlessError
from padless.bench.report import render_html, write_html
from support.browser import browser, console_errors, requests


class Balanced(HTMLParser):
    """Every tag that is opened is closed, in order."""

    void = frozenset({"meta", "link", "br", "rect"})

    def __init__(self) -> None:
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_refers_to_nothing_outside(small_report):
    page = render_html(small_report)
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    tags = {tag for tag, _ in parser.seen}
    assert not tags & {"script", "img", "iframe", "object"}
    links = [attrs[name] for _, attrs in parser.seen for name in ("href", "src") if name in attrs]
    assert links == ["data:,"]
    assert "http" not in re.sub(r'http-equiv="[^"]*"', "", page)


def test_every_micro_batch_is_drawn_with_every_sequence(small_report):
    page = render_html(small_report)
    drawings = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    arms = [arm for model in small_report.models.values() for arm in model.arms.values()]
    assert len(drawings) == len(arms)
    for arm, drawn in zip(arms, drawings, strict=True):
        micros = arm.steps[0].micros
        assert drawn.count('class="padding"') == len(micros)
        assert drawn.count("<rect") == len(micros) + sum(len(micro.lengths) for micro in micros)
        # Areas tell the occupancy: real ones over computed ones.
        boxes = re.findall(r'<rect class="(\S+?)(?: other)?" x="\S+" y="\S+" width="(\S+)" height="(\S+)"/>', drawn)
        padded = sum(float(w) * float(h) for kind, w, h in boxes if kind == "padding")
        real = sum(float(w) * 7.0 for kind, w, _ in boxes if kind != "padding")
        assert real / padded == pytest.approx(arm.real_tokens / arm.padded_tokens, rel=0.05)


def test_figures_verdicts_and_the_machine_are_on_the_page(small_report):
    page = render_html(small_report)
    for text in ("timing only", "leaks", "limit in float32", small_report.machine["processor"], "AdamW", "linear in"):
        assert text in page
    assert page.count("not exact") == 2  # the hybrid, packed: by segments and by position ids


def test_other_work_beside_the_benchmark_is_told(small_report):
    from dataclasses import replace

    def loaded(load):
        return replace(small_report, machine={**small_report.machine, "cores": 2, "threads": 2, "load_average": load})

    assert loaded(2.4).disturbed is None
    assert loaded(None).disturbed is None
    assert "load 5.1" in loaded(5.1).disturbed
    assert "load 5.1" in render_html(loaded(5.1))
    assert small_report.machine["load_average"] >= 0


def test_a_name_from_outside_cannot_break_the_page(small_report):
    from dataclasses import replace

    odd = replace(small_report, workload={**small_report.workload, "name": "<script>alert(1)</script>"})
    assert "<script" not in render_html(odd)


def test_folders_are_made_and_a_path_that_cannot_be_written_is_refused(small_report, tmp_path):
    path = write_html(small_report, tmp_path / "deep" / "er" / "report.html")
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    with pytest.raises(PadlessError, match="cannot write"):
        write_html(small_report, tmp_path)


@pytest.mark.browser
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_a_browser_draws_it_offline_without_errors(small_report, tmp_path, width, dark):
    path = write_html(small_report, tmp_path / "report.html")
    with browser(tmp_path / "profile", width=width, dark=dark) as driver:
        driver.get(path.as_uri())
        assert console_errors(driver) == []
        outside = [address for address in requests(driver) if not address.startswith(("file:", "data:", "about:"))]
        assert outside == []
        # Nothing sticks out sideways; wide tables scroll by themselves.
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width
        fills = driver.execute_script(
            "return [...document.querySelectorAll('.bar .fill')].map(e => e.getBoundingClientRect().width)"
        )
        assert len(fills) == 2 * 2 * 5
        assert min(fills) >= 1
        heights = driver.execute_script(
            "return [...document.querySelectorAll('svg')].map(e => e.getBoundingClientRect().height)"
        )
        assert len(heights) == 2 * 5
        assert min(heights) > 1
        columns = driver.execute_script(
            "return [...document.querySelectorAll('.histogram div')]"
            ".filter(e => e.getBoundingClientRect().height > 5).length"
        )
        assert columns >= 2
        shade = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
        light = sum(int(part) for part in re.findall(r"\d+", shade)[:3])
        assert light < 150 if dark else light > 600
