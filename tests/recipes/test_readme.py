"""What the README and the documentation show runs as it is written."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from lit_rlhf.cli import LitRLHFCLI
from lit_rlhf.commands import find_command
from lit_rlhf.compare import ComparisonRuns

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def blocks(language):
    """Code blocks of every page, with a name each."""
    for page in PAGES:
        found = [body for kind, body in _BLOCK.findall(page.read_text(encoding="utf-8")) if kind == language]
        for number, body in enumerate(found, start=1):
            yield pytest.param(body, id=f"{page.name}-{number}")


def command_lines():
    """Every ``lit-rlhf`` line of the pages."""
    for page in PAGES:
        for kind, body in _BLOCK.findall(page.read_text(encoding="utf-8")):
            if kind == "bash":
                for line in body.replace("\\\n", " ").splitlines():
                    if line.startswith("lit-rlhf "):
                        yield pytest.param(line, id=line)


@pytest.fixture
def tree(tmp_path):
    """The repository's root as a run sees it, in a folder of its own."""
    (tmp_path / "checkpoints").mkdir()
    for name in ("recipes", "checkpoints/arithmetic"):
        (tmp_path / name).symlink_to(ROOT / name, target_is_directory=True)
    return tmp_path


@pytest.mark.parametrize("code", list(blocks("python")))
def test_a_python_block_runs(code, tree, run_python):
    file = tree / "block.py"
    file.write_text(code, encoding="utf-8")
    run_python(file, cwd=tree)


@pytest.mark.parametrize("line", list(command_lines()))
def test_a_command_line_parses(line, tree, monkeypatch, capsys):
    monkeypatch.chdir(tree if " compare " in line else ROOT)
    monkeypatch.setattr("sys.argv", ["lit-rlhf"])
    monkeypatch.setattr(ComparisonRuns, "run", lambda *args, **options: None)  # takes minutes
    monkeypatch.setattr(
        "lit_rlhf.commands.report.write_report", lambda folder, *args, **options: Path(folder)
    )  # of a run to come
    args = shlex.split(line, comments=True)[1:]
    if command := find_command(args):
        command()
        return
    with pytest.raises(SystemExit) as stop:
        LitRLHFCLI(args if ".help" in line else [*args, "--print_config"])
    assert stop.value.code == 0, capsys.readouterr().err


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in _LINK.findall(page.read_text(encoding="utf-8")):
        assert link.startswith("https://") or (page.parent / link).exists(), link


def test_there_is_something_to_run():
    assert len(list(blocks("python"))) >= 3
    assert len(list(command_lines())) >= 8
