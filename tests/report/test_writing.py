from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lit_rlhf.errors import ConfigurationError
from lit_rlhf.report import write_report
from tests.report.folders import (
    alarm,
    comparison_entry,
    evaluation_lines,
    run_rows,
    write_comparison,
    write_lines,
    write_metrics,
    write_run,
)

FILES = ("report.html", "report.md", "report.json")


class Page(HTMLParser):
    """Ids, links and what would be loaded."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        self.ids += [given["id"] or ""] if "id" in given else []
        self.links += [given["href"] or ""] if tag == "a" else []
        self.loads += [value or "" for name, value in attrs if name in ("src", "xlink:href") or (tag == "link")]


def _texts(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES}


def test_the_same_folder_gives_the_same_bytes(comparison_dir: Path, tmp_path: Path) -> None:
    write_report(comparison_dir, out=tmp_path / "a" / "b")
    first = _texts(tmp_path / "a" / "b")
    write_report(comparison_dir, out=tmp_path / "a" / "b")
    assert _texts(tmp_path / "a" / "b") == first
    assert write_report(comparison_dir) == comparison_dir / "report.html"
    assert _texts(comparison_dir)["report.md"] == first["report.md"]


def test_another_run_of_the_same_seeds_changes_nothing_but_time_and_memory(comparison_dir: Path) -> None:
    write_report(comparison_dir)
    first = json.loads((comparison_dir / "report.json").read_text())
    html = (comparison_dir / "report.html").read_text()
    for file in comparison_dir.rglob("metrics.csv"):
        header, *lines = [line.split(",") for line in file.read_text().splitlines()]
        for line in lines:
            for place, name in enumerate(header):
                if name.startswith(("time/", "memory/")) and line[place]:
                    line[place] = str(float(line[place]) * 1.5 + 0.1)
        file.write_text("\n".join(",".join(line) for line in [header, *lines]) + "\n")
    write_report(comparison_dir)
    second = json.loads((comparison_dir / "report.json").read_text())
    assert second.pop("timing") != first.pop("timing")
    assert second == first

    def rest(page: str) -> str:
        """Without what the page says to be of time and memory."""
        page = re.sub(r'<section id="time">.*?</section>', "", page, flags=re.DOTALL)
        page = re.sub(r'<p class="label">Time and memory.*?</ul>', "", page, flags=re.DOTALL)
        assert "memory/" not in page
        return page

    assert rest((comparison_dir / "report.html").read_text()) == rest(html)


def test_every_number_of_the_page_leads_to_its_files(comparison_dir: Path, tmp_path: Path) -> None:
    page = Page(write_report(comparison_dir, out=tmp_path / "elsewhere").read_text())
    assert len(page.ids) == len(set(page.ids))
    anchors = [link[1:] for link in page.links if link.startswith("#")]
    assert len(anchors) > 50
    assert set(anchors) <= set(page.ids)
    files = {link for link in page.links if not link.startswith("#")}
    assert files
    assert all((tmp_path / "elsewhere" / file).is_file() for file in files)


def test_the_numbers_of_the_json_are_in_the_files_that_it_names(comparison_dir: Path) -> None:
    write_report(comparison_dir)
    content = json.loads((comparison_dir / "report.json").read_text())
    assert content["token_budget"] == 2000
    numbers = content["numbers"] + content["timing"]["numbers"]
    checked = 0
    for number in numbers:
        for value in number["values"]:
            match = re.fullmatch(r"(\S+) at step (\d+)", value["metric"])
            if match:
                lines = (comparison_dir / value["file"]).read_text().splitlines()
                columns = lines[0].split(",")
                place = columns.index(match[1])
                step = columns.index("step")
                cells = [line.split(",") for line in lines[1:]]
                found = [row[place] for row in cells if float(row[step]) == int(match[2]) and row[place]]
                assert float(found[-1]) == value["value"]
                checked += 1
    assert checked >= 3 * 3 * 2
    assert {d["claimed"] for d in content["differences"]} == {True, False}


def test_the_page_needs_nothing_else(comparison_dir: Path) -> None:
    text = write_report(comparison_dir).read_text()
    page = Page(text)
    assert "script" not in page.tags
    assert page.loads in ([], ["icon", "data:,"])
    assert "http" not in re.sub(r'xmlns(:xlink)?="[^"]*"', "", text)
    assert not re.search(r"#0a0[0-9a-f]{3}", text)  # all stand-in colours were replaced
    assert text.count("<figure") == text.count('<svg viewBox="0 0 3') >= 12


def test_texts_of_models_are_texts(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>|</pre>\n# heading"
    folder = write_run(tmp_path / "run", alarms=[{**alarm("x", 1), "finding": evil}])
    lines = evaluation_lines(lambda index: True)
    lines[0]["greedy"]["completion"] = lines[0]["prompt"] = evil
    write_lines(folder / "csv" / "version_0" / "evaluation" / "val-00000020.jsonl", lines)
    write_lines(folder / "csv" / "version_0" / "evaluation" / "val-00000000.jsonl", lines)
    page = write_report(folder).read_text()
    assert "<script" not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 3
    markdown = (folder / "report.md").read_text()
    row = next(line for line in markdown.splitlines() if line.startswith("| <script>"))
    assert row.count("\\|") == 3
    assert len(re.findall(r"(?<!\\)\|", row)) == 4


def test_a_comparison_that_has_just_begun(tmp_path: Path) -> None:
    arms = [
        comparison_entry(tmp_path, "a", "A", (1, 2), {1: "running", 2: "pending"}, rows=run_rows()[:1]),
        comparison_entry(tmp_path, "b", "B", (1,), {1: "pending"}),
    ]
    page = write_report(write_comparison(tmp_path, arms)).read_text()
    assert "A, seed 1: still running." in page
    assert "B, seed 1: not begun." in page


def test_a_run_in_its_first_iteration(tmp_path: Path) -> None:
    write_metrics(tmp_path, run_rows()[:2])
    page = write_report(tmp_path).read_text()
    assert "One validation so far: greedy accuracy 0.5." in page


def test_an_arm_with_a_failed_run_among_others(tmp_path: Path) -> None:
    arms = [
        comparison_entry(tmp_path, "a", "A", (1, 2, 3), {2: "failed"}),
        comparison_entry(tmp_path, "b", "B", (1, 3)),
    ]
    page = write_report(write_comparison(tmp_path, arms), target_accuracy=0.8).read_text()
    assert "A: 2 of 3 runs" in page
    assert "A, seed 2, failed and is not counted: CUDA out of memory." in page
    assert "tokens to accuracy 0.8" in page
    assert "seed 2" not in re.sub(r"A, seed 2, failed", "", page)


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigurationError, match=re.escape("pip install 'lit-rlhf[report]'")):
        write_report(write_run(tmp_path))


def test_a_report_does_not_read_itself(comparison_dir: Path) -> None:
    write_report(comparison_dir)
    before = _texts(comparison_dir)
    write_report(comparison_dir)
    assert _texts(comparison_dir) == before


def test_two_arms_have_their_difference_beside_them(tmp_path: Path) -> None:
    arms = [
        comparison_entry(tmp_path, "grpo", "GRPO", (1, 2, 3)),
        comparison_entry(tmp_path, "ppo", "PPO", (1, 2, 3), critic=True, accuracy=lambda p: 0.5 + 0.2 * p),
    ]
    write_report(write_comparison(tmp_path, arms))
    lines = (tmp_path / "report.md").read_text().splitlines()
    accuracy = next(line for line in lines if line.startswith("| greedy accuracy |"))
    assert re.search(r"\| \*\*−0\.\d+ \(−0\.\d+ to −0\.\d+\)\*\* \|$", accuracy)
    # What only one of them has differs from nothing.
    assert next(line for line in lines if line.startswith("| critic error |")).endswith("| – |")
    assert '<td class="number claimed">−0.' in (tmp_path / "report.html").read_text()
