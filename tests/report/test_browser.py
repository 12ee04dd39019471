from __future__ import annotations

from collections.abc import Iterator

import pytest

from lit_rlhf.report import write_report
from tests.report.browser import NAMES, Browser, find_chromium
from tests.report.folders import alarm, comparison_entry, write_comparison, write_run, write_three_arms

pytestmark = pytest.mark.skipif(find_chromium() is None, reason=f"no browser is installed: none of {', '.join(NAMES)}")

PICTURES = """[...document.querySelectorAll("figure svg")].map(one => {
  const box = one.getBoundingClientRect();
  const ink = one.querySelectorAll("path").length;
  return [box.width, box.height, ink];
})"""
SMALLEST_LETTERS = """Math.min(...[...document.querySelectorAll("figure svg text")].map(
  one => one.getBoundingClientRect().height))"""
# What a reader could see that sticks out of the page; a table in its own scrolling box does not.
OVERFLOW = """document.documentElement.scrollWidth - window.innerWidth"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("reports")
    single = write_run(folder / "a-run-with-quite-a-long-name-that-has-to-be-broken-somewhere", critic=True)
    rung = [alarm("an_advice_of_one_word_" * 20, 1)]
    many = [
        comparison_entry(folder / "many", f"arm{place}", f"Arm number {place} of the comparison", (1, 2), alarms=rung)
        for place in range(9)
    ]
    folders = {
        "single": single,
        "three": write_three_arms(folder / "three"),
        "many": write_comparison(folder / "many", many),
    }
    return {name: write_report(folder).as_uri() for name, folder in folders.items()}


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_the_report_can_be_read(browser: Browser, pages: dict[str, str], width: int, dark: bool) -> None:
    for name, url in pages.items():
        browser.open(url, width, dark=dark)
        assert browser.complaints() == []
        pictures = browser.evaluate(PICTURES)
        assert len(pictures) >= 8, name
        for wide, high, ink in pictures:
            assert 200 < wide <= width
            assert high > 60
            assert ink > 3
        assert browser.evaluate(SMALLEST_LETTERS) > 9  # pixels, as tall as letters of a footnote
        assert browser.evaluate(OVERFLOW) <= 0, name


def test_lines_can_be_told_from_the_page_in_light_and_dark(browser: Browser, pages: dict[str, str]) -> None:
    colours = []
    for dark in (False, True):
        browser.open(pages["three"], 1280, dark=dark)
        line = 'getComputedStyle(document.querySelector("#plot-reward-tokens svg path[style*=arm-0]")).stroke'
        back = 'getComputedStyle(document.querySelector("section")).backgroundColor'
        text = 'getComputedStyle(document.querySelector("#plot-reward-tokens svg text")).fill'
        colours.append([browser.evaluate(one) for one in (line, back, text)])
        assert len(set(colours[-1])) == 3
    assert all(light != dark for light, dark in zip(*colours, strict=True))


def test_a_number_opens_the_lines_that_it_comes_from(browser: Browser, pages: dict[str, str]) -> None:
    browser.open(pages["three"], 1280)
    is_open = 'document.querySelector("section#details .sources").closest("details").open'
    assert not browser.evaluate(is_open)
    browser.evaluate('document.querySelector("section#numbers td.number a").click()')
    browser.wait_for(is_open)
    assert "metrics.csv" in browser.evaluate('document.querySelector(":target").textContent')
