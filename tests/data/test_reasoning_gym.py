from __future__ import annotations

import importlib.util

import pytest

from lit_rlhf.data import ReasoningGym
from lit_rlhf.data.rows import read_rows
from lit_rlhf.errors import ConfigurationError, DataError

installed = importlib.util.find_spec("reasoning_gym") is not None
needs_package = pytest.mark.skipif(not installed, reason="needs the extra reasoning-gym")


@pytest.mark.skipif(installed, reason="the package is there")
def test_a_missing_package_is_named_with_the_extra() -> None:
    with pytest.raises(ConfigurationError, match=r"pip install 'lit-rlhf\[reasoning-gym\]'"):
        ReasoningGym("countdown")


def test_a_size_without_rows() -> None:
    with pytest.raises(ConfigurationError, match="size must be at least 1, got 0"):
        ReasoningGym("countdown", size=0)


@needs_package
def test_rows_follow_from_the_seed_and_keep_their_types() -> None:
    source = ReasoningGym("simple_equations", size=3, seed=1, options={"max_value": 9})
    rows = read_rows(source)
    assert (
        rows.rows == read_rows(source).rows == read_rows(ReasoningGym("simple_equations", 3, 1, {"max_value": 9})).rows
    )
    assert rows.rows != read_rows(ReasoningGym("simple_equations", 3, 2, {"max_value": 9})).rows
    assert len(rows) == 3
    assert rows.where(1) == "ReasoningGym(simple_equations, seed 1), row 2"
    assert rows.columns == ["prompt", "question", "answer", "metadata", "task", "task_options"]
    # A verifier that compares with what the task put there must find it as it was.
    metadata = read_rows(ReasoningGym("arc_agi", size=1)).rows[0]["metadata"]
    assert isinstance(metadata["output"], tuple)


@needs_package
def test_unknown_tasks_and_options_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"no task 'countdwn' .* did you mean countdown"):
        ReasoningGym("countdwn")
    with pytest.raises(ConfigurationError, match=r"refuses the options of 'countdown': .*numbers_min"):
        ReasoningGym("countdown", options={"numbers_min": 3})
    with pytest.raises(DataError, match=r"row 1: reasoning-gym cannot make it .*'max_num_decimal_places': 2"):
        read_rows(ReasoningGym("decimal_arithmetic", options={"max_num_decimal_places": 2}))
    with pytest.raises(DataError, match="no splits"):
        read_rows(ReasoningGym("countdown", size=1), split="train")
