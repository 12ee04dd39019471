from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lit_rlhf.rewards.extras import ExtraMeans, extras_tensor

NAN = float("nan")


def test_means_over_calls() -> None:
    means = ExtraMeans()
    means.add({"a": [1.0, NAN], "b": [NAN, NAN]})
    means.add({"a": [2.0, 3.0], "c": [5.0, 5.0]})
    assert means.take() == {"a": 2.0, "c": 5.0}
    means.add({"a": [1.0]})
    means.clear()
    assert means.take() == {}


def test_tensor() -> None:
    found = extras_tensor({"a": [1.0, NAN], "b": [3.0, 4.0]}, 2)
    assert torch.equal(found.nan_to_num(-1), torch.tensor([[1.0, 3.0], [-1.0, 4.0]]))
    assert extras_tensor({}, 3).shape == (3, 0)


@pytest.mark.distributed
def test_ranks_may_have_other_names(tmp_path: Path) -> None:
    code = (
        "import json, sys, torch\n"
        "from lit_rlhf.rewards.extras import ExtraMeans\n"
        "rank = int(sys.argv[1])\n"
        f"torch.distributed.init_process_group('gloo', init_method='file://{tmp_path}/meet', rank=rank, world_size=2)\n"
        "means = ExtraMeans()\n"
        "means.add({'a': [1.0, 2.0, 3.0]} if rank == 0 else {'a': [8.0], 'only here': [5.0]})\n"
        "print(json.dumps(means.take()))\n"
    )
    ranks = [
        subprocess.Popen([sys.executable, "-c", code, str(rank)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
        for rank in range(2)
    ]
    for process in ranks:
        output, _ = process.communicate(timeout=120)
        assert json.loads(output) == {"a": 3.5, "only here": 5.0}
