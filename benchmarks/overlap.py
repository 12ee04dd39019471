"""What sampling while learning gains: the quickstart's task with a vLLM server, in turn and at once.

    .venv-vllm/bin/python benchmarks/overlap.py

Server and trainer have a core each, and each rollout is learned from four times. Runs with ``staleness`` 0 and 1 take
turns; of each the first two iterations do not count. Needs vLLM (``make test-vllm`` makes the environment).
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from statistics import median
from typing import Any

from report import save, table

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "checkpoints" / "arithmetic"
PHASES = ("generation", "rewards", "reference", "training")
NOT_COUNTED = 2


def start_server(core: int, log: Path) -> tuple[subprocess.Popen[bytes], str]:
    """A server with a core of its own, once it answers, and its address.

    Args:
        core: Its number.
        log: What it prints.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["taskset", "-c", str(core), sys.executable, "-m", "lit_rlhf.engines.vllm", str(MODEL)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCH_COMPILE_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
    }
    with log.open("wb") as out:
        server = subprocess.Popen(
            [*command, "--max-model-len", "64"], stdout=out, stderr=out, env=environment, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    while server.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return server, url
        except OSError:
            time.sleep(0.5)
    raise SystemExit(f"the server did not start: {log.read_text(errors='replace')[-2000:]}")


def fit(url: str, staleness: int, iterations: int, folder: str) -> tuple[list[dict[str, float]], float]:
    """Seconds of each counted iteration by phase, and the mean reward of the last.

    Args:
        url: Of the server.
        staleness: 0 or 1.
        iterations: All of them.
        folder: For logs.
    """
    import lightning as L

    from lit_rlhf import GRPOModule, RolloutDataModule
    from lit_rlhf.engines import VLLMServers
    from lit_rlhf.rewards import MathAnswer

    class Clock(L.Callback):
        def __init__(self) -> None:
            self.started = 0.0
            self.iterations: list[dict[str, float]] = []

        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            now = time.perf_counter()
            seconds = {name: data.timer.seconds.get(name, 0.0) for name in PHASES}
            whole = now - self.started
            seconds["training"] = whole - sum(seconds.values())
            reward = float(pl_module.iteration_values["reward"])  # type: ignore[index]
            self.iterations.append({**seconds, "whole iteration": whole, "reward": reward})
            self.started = now

    clock = Clock()
    module = GRPOModule(str(MODEL), lr=1e-4, kl_coef=0.02, sampling_correction="token_truncate")
    data = RolloutDataModule(
        ROOT / "recipes" / "quickstart" / "data" / "train.jsonl",
        rewards=[MathAnswer()],
        prompts_per_iteration=64,
        group_size=8,
        max_new_tokens=8,
        passes=4,
        seed=1,
        staleness=staleness,  # type: ignore[arg-type]
        engine=VLLMServers(url),
    )
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=iterations,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module, data)
    reward = clock.iterations[-1]["reward"]
    return clock.iterations[NOT_COUNTED:], reward


def main() -> None:
    """Measure, print, save."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--iterations", type=int, default=10, help="of each run (default 10)")
    options.add_argument("--rounds", type=int, default=2, help="runs of each kind (default 2)")
    options.add_argument("--quick", action="store_true", help="one short run of each")
    arguments = options.parse_args()
    iterations, rounds = (5, 1) if arguments.quick else (arguments.iterations, arguments.rounds)
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("two cores are needed, one for the server and one for the trainer")
    os.sched_setaffinity(0, {cores[1]})
    import torch

    torch.set_num_threads(1)
    seen: dict[int, list[dict[str, float]]] = {0: [], 1: []}
    rewards: dict[int, list[float]] = {0: [], 1: []}
    with tempfile.TemporaryDirectory() as folder:
        server, url = start_server(cores[0], Path(folder) / "server.log")
        try:
            for _ in range(rounds):
                for staleness in seen:
                    counted, reward = fit(url, staleness, iterations, folder)
                    seen[staleness] += counted
                    rewards[staleness].append(reward)
        finally:
            os.killpg(server.pid, signal.SIGKILL)

    def of(staleness: int, name: str) -> float:
        return median(values[name] for values in seen[staleness])

    names = (*PHASES, "whole iteration")
    rows = [["median seconds", "staleness 0", "staleness 1"]]
    rows += [[name, *(f"{of(staleness, name):.3f}" for staleness in seen)] for name in names]
    rows += [["reward of the last iteration", *(f"{median(rewards[staleness]):.3f}" for staleness in seen)]]
    print(table(rows))
    print("generation is what the trainer waits for completions")
    print(f"sampling while learning: {of(0, 'whole iteration') / of(1, 'whole iteration'):.2f}x")
    record: dict[str, Any] = {str(staleness): {name: of(staleness, name) for name in names} for staleness in seen}
    save("overlap-quick" if arguments.quick else "overlap", record)


if __name__ == "__main__":
    main()
