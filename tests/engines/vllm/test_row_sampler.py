"""What happens to vLLM's logits, without vLLM around it."""

from __future__ import annotations

import numpy as np
import torch

from lit_rlhf.engines import SamplingParams
from lit_rlhf.engines.randomness import row_keys, uniforms
from lit_rlhf.engines.sampling import sample_tokens
from lit_rlhf.engines.vllm.row_sampler import RowDrawing, _Row

WARM, RESTRICTED, GREEDY = SamplingParams(1, 1.4), SamplingParams(1, 0.7, top_k=3), SamplingParams(1, 0.0)


def drawing(rows):
    sampler = RowDrawing(None, torch.device("cpu"), False)
    sampler.rows = rows
    return sampler


def test_each_row_keeps_the_token_that_its_key_and_place_draw_and_its_log_prob():
    torch.manual_seed(0)
    logits, keys = torch.randn(6, 50), row_keys(3, 0, 0, [1], 6)
    rows = {
        place: _Row(int(keys[place]), sampling, [7] * step)
        for place, sampling, step in [(0, WARM, 0), (1, RESTRICTED, 4), (3, WARM, 9), (4, GREEDY, 2), (5, WARM, 9)]
    }
    left = drawing(rows).apply(logits.clone())
    for place, row in rows.items():
        step = len(row.output_ids)
        uniform = torch.from_numpy(uniforms(keys[place : place + 1], step + 1)[:, step])
        token, log_prob = sample_tokens(logits[place : place + 1], uniform, row.sampling)
        assert left[place].isfinite().nonzero().tolist() == [[int(token)]]
        torch.testing.assert_close(left[place, token], log_prob)
    assert torch.equal(left[2], logits[2]), "a request of somebody else"


def test_rows_that_grow_draw_the_next_numbers():
    logits, output = torch.zeros(1, 400), []
    sampler = drawing({0: _Row(int(np.uint64(2**63 + 5)), WARM, output)})
    drawn = []
    for _ in range(20):
        drawn.append(int(sampler.apply(logits.clone()).argmax()))
        output.append(drawn[-1])
    expected = uniforms(np.array([2**63 + 5], dtype=np.uint64), 20)[0] * 400
    assert drawn == expected.astype(int).tolist()
