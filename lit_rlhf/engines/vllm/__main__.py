"""``python -m lit_rlhf.engines.vllm MODEL [options]``: ``vllm serve`` with what rollouts need of it."""

from __future__ import annotations

import os
import sys

from lit_rlhf.engines.vllm.colocated import require_vllm
from lit_rlhf.engines.vllm.requests import LOGPROBS_MODE, ROW_SAMPLER

_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # weights may be replaced
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the one whose logits processors the row sampler is written for
}
_ARGUMENTS = [
    *("--logits-processors", ROW_SAMPLER),
    *("--logprobs-mode", LOGPROBS_MODE),
    *("--generation-config", "vllm"),
    "--enable-scale-out",
    "--no-async-scheduling",
]


def main(arguments: list[str]) -> None:
    """Become ``vllm serve``.

    Args:
        arguments: The model's folder or name and further options of ``vllm serve``.
    """
    require_vllm()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", *arguments, *_ARGUMENTS]
    os.execve(sys.executable, command, {**_ENVIRONMENT, **os.environ})


if __name__ == "__main__":
    main(sys.argv[1:])
