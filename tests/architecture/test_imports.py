"""Arrows between the rooms point down, and importing the package is light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lit_rlhf

PACKAGE = Path(lit_rlhf.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
HEAVY = ["transformers", "bitsandbytes", "peft", "datasets", "math_verify", "vllm"]
UPPER = {"modules", "rollout", "callbacks", "commands", "cli", "__main__"}
# What the files of a room (or a single file of the root) must not import.
FORBIDDEN = {
    "engines": UPPER | {"rewards", "metrics", "data"},
    "models": UPPER | {"engines", "rewards", "metrics", "data"},
    "rewards": UPPER | {"engines", "metrics"},  # a reward model is a model
    "metrics": UPPER | {"engines", "models", "rewards", "data"},
    "data": UPPER,
    "modules": {"commands", "cli", "__main__"},
    "rollout": {"modules", "commands", "cli", "__main__"},
    "callbacks": {"commands", "cli", "__main__"},
}


def _only_for_types(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _statements(nodes: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Every statement that can run, inside functions too."""
    for node in nodes:
        yield node
        if _only_for_types(node):
            yield from _statements(node.orelse)
            continue
        for field in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(node, field, []))
        for branch in [*getattr(node, "handlers", []), *getattr(node, "cases", [])]:
            yield from _statements(branch.body)


def imported(source: str, package: str = "lit_rlhf") -> set[str]:
    """Full names of the modules that the source imports when it runs."""
    names: set[str] = set()
    for node in _statements(ast.parse(source).body):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            names.update({base} | {f"{base}.{alias.name}" for alias in node.names})
    return names


def _room(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else parts[0].removesuffix(".py")


def _rooms_imported(path: Path) -> set[str]:
    package = ".".join(["lit_rlhf", *path.relative_to(PACKAGE).parts[:-1]])
    names = imported(path.read_text(encoding="utf-8"), package)
    return {name.split(".")[1] for name in names if name.startswith("lit_rlhf.")}


def _violations() -> list[str]:
    return [
        f"{path.relative_to(PACKAGE)} imports {room}"
        for path in FILES
        for room in sorted(_rooms_imported(path) & FORBIDDEN.get(_room(path), set()))
    ]


def test_the_reader_of_imports_sees_all_of_them_and_skips_those_for_types():
    source = """
import a.b
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import hidden
else:
    import shown
def f():
    try:
        from lit_rlhf import modules
    except ImportError:
        from ..rollout import batch
    with x:
        from . import near
class C:
    import inner
"""
    names = imported(source, "lit_rlhf.engines")
    expected = {"a.b", "shown", "lit_rlhf.modules", "lit_rlhf.rollout.batch", "lit_rlhf.engines.near", "inner"}
    assert expected <= names
    assert "hidden" not in names


def test_arrows_point_down():
    assert _violations() == []


def test_the_rooms_of_the_rules_exist():
    assert all((PACKAGE / room).is_dir() for room in FORBIDDEN)
    assert len(FILES) > 40


@pytest.mark.parametrize("path", sorted((PACKAGE / "functional").glob("*.py")), ids=lambda path: path.name)
def test_functional_imports_torch_alone(path):
    names = imported(path.read_text(encoding="utf-8"), "lit_rlhf.functional")
    roots = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names)
    assert roots <= {"torch", "lit_rlhf"}
    assert _rooms_imported(path) <= {"functional"}


def _modules_after(code: str) -> set[str]:
    program = f"import sys\n{code}\nprint(*sorted(sys.modules), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.split())


def test_importing_the_package_is_light():
    loaded = _modules_after("import lit_rlhf")
    assert "lit_rlhf" in loaded
    assert [name for name in HEAVY if name in loaded] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_heavy_packages_are_imported_where_they_are_used(path):
    at_import = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if not _only_for_types(node)]
    outside = [node for node in at_import if not isinstance(node, ast.FunctionDef | ast.ClassDef)]
    names = imported(ast.unparse(ast.Module(outside, [])))
    assert sorted({name.split(".")[0] for name in names} & set(HEAVY)) == []


def test_functional_loads_nothing_but_torch():
    roots = {
        name.split(".")[0] for name in _modules_after("import lit_rlhf.functional") - _modules_after("import torch")
    }
    assert roots - set(sys.stdlib_module_names) <= {"lit_rlhf"}


def test_every_public_name_resolves():
    assert len(set(lit_rlhf.__all__)) == len(lit_rlhf.__all__) > 1
    for name in lit_rlhf.__all__:
        value = getattr(lit_rlhf, name)
        assert name == "__version__" or value.__name__ == name
    assert set(lit_rlhf.__all__) <= set(dir(lit_rlhf))
    with pytest.raises(AttributeError, match="Nothing"):
        lit_rlhf.Nothing  # noqa: B018


def test_no_file_is_a_drawer_of_odds_and_ends():
    assert [path.name for path in FILES if path.name in {"utils.py", "common.py", "helpers.py"}] == []


def test_no_file_is_too_long():
    lengths = {str(path.relative_to(PACKAGE)): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {name: lines for name, lines in lengths.items() if lines > 350} == {}


def test_the_package_is_marked_as_typed():
    assert (PACKAGE / "py.typed").is_file()


@pytest.mark.parametrize(
    "module", ["rollout.evaluation", "rollout.pipeline", "callbacks", "report", "compare", "engines"]
)
def test_any_room_may_be_imported_first(module):
    subprocess.run([sys.executable, "-c", f"import lit_rlhf.{module}"], check=True)
