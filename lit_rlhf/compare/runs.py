"""The runs of a comparison: each a process of ``lit-rlhf fit``, and a record of how far they are."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from lit_rlhf.checkpointing import atomic_file
from lit_rlhf.compare.arms import ArmRecipe, merge
from lit_rlhf.errors import ConfigurationError
from lit_rlhf.report.comparison import COMPARISON_NAME
from lit_rlhf.report.runs import read_run

OUTCOME_NAME = "outcome.json"
Status = Literal["pending", "running", "done", "failed"]


@dataclass
class RunState:
    """One arm with one seed.

    Attributes:
        arm: Name of the arm.
        seed: Of ``seed_everything``.
        folder: Where it writes, below that of the comparison.
        status: ``done`` is not run again.
        error: Why it failed.
        seconds: Of the process, over all of its starts.
        generated_tokens: Completion tokens.
        recipe: Digest of what was run.
    """

    arm: str
    seed: int
    folder: str
    status: Status = "pending"
    error: str | None = None
    seconds: float = 0.0
    generated_tokens: int | None = None
    recipe: str = ""


class ComparisonRuns:
    """Run every arm with every seed until each has generated as many tokens.

    A run that is done is not run again; one that was interrupted goes on from its last checkpoint; one that fails is
    noted, and the others go on. ``comparison.json`` in the folder says at any time how far each is.

    Args:
        arms: Of :func:`~lit_rlhf.compare.arm_recipes`.
        seeds: Of ``seed_everything``.
        token_budget: Completion tokens that each run generates.
        out: Folder of the comparison.
        jobs: Runs at a time, each in a process of its own with its share of the machine's cores. Seeds are begun one
            after the other, so that the arms of a seed are disturbed alike.

    Raises:
        ConfigurationError: The folder holds a run of another recipe.
    """

    def __init__(
        self,
        arms: Sequence[ArmRecipe],
        seeds: Sequence[int],
        token_budget: int,
        out: str | Path,
        jobs: int = 1,
    ) -> None:
        self.arms = {arm.name: arm for arm in arms}
        self.token_budget = token_budget
        self.out = Path(out)
        self.jobs = jobs
        self.runs = [RunState(arm, seed, f"{arm}/seed-{seed}") for seed in seeds for arm in self.arms]
        self._lock = threading.Lock()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stopped = False
        self._recall()

    def recipe(self, run: RunState) -> dict[str, Any]:
        """What ``lit-rlhf fit`` is given: the arm's recipe, the seed, loggers, a checkpoint, and the budget as its end.

        Args:
            run: Of this comparison.
        """
        folder = self.out / run.folder
        recipe = self.arms[run.arm].recipe
        trainer = recipe.get("trainer") or {}
        callbacks = [one for one in trainer.get("callbacks") or [] if "ModelCheckpoint" not in str(one)]
        every = trainer.get("check_val_every_n_epoch") or 1
        ours: dict[str, Any] = {
            "max_epochs": -1,
            "max_steps": -1,
            "log_every_n_steps": 1,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(folder),
            "logger": [
                {"class_path": "lightning.pytorch.loggers.CSVLogger",
                 "init_args": {"save_dir": str(folder), "name": "csv", "flush_logs_every_n_steps": 1}},
                {"class_path": "lightning.pytorch.loggers.TensorBoardLogger",
                 "init_args": {"save_dir": str(folder), "name": "tensorboard", "default_hp_metric": False}},
            ],
            "callbacks": [
                *callbacks,
                {"class_path": "lit_rlhf.callbacks.TokenBudget", "init_args": {"tokens": self.token_budget}},
                {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
                 "init_args": {"dirpath": str(folder / "checkpoints"), "filename": "last", "every_n_epochs": every,
                               "save_on_train_epoch_end": True, "enable_version_counter": False}},
            ],
        }  # fmt: skip
        return merge({"seed_everything": run.seed}, merge(recipe, {"trainer": ours}))

    def check(self) -> None:
        """Read each arm's recipe as ``fit`` would, without loading a model.

        Raises:
            ConfigurationError: Naming the arm.
        """
        from lit_rlhf.commands.recipe import read_recipe
        from lit_rlhf.errors import LitRLHFError

        for arm in self.arms:
            run = next(run for run in self.runs if run.arm == arm)
            path = self._write_recipe(run)
            try:
                read_recipe(["-c", str(path)])
            except LitRLHFError as error:
                raise ConfigurationError(f"arms.{arm}: {error}") from error

    def run(
        self,
        on_change: Callable[[RunState], None] = lambda run: None,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        """Run what is not done.

        Args:
            on_change: Called from another thread when a run begins or ends.
            on_wait: Called about once a second.

        Raises:
            KeyboardInterrupt: After every run has ended its iteration and saved a checkpoint.
        """
        waiting = [run for run in self.runs if run.status != "done"]
        self._write()
        pool = ThreadPoolExecutor(self.jobs)
        futures = [pool.submit(self._run_one, run, on_change) for run in waiting]
        try:
            while wait(futures, timeout=1.0).not_done:
                on_wait()
            for future in futures:
                future.result()
        except BaseException:
            self.stop()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
            self._write()

    def stop(self) -> None:
        """Let the runs that are going on end their iteration and save a checkpoint."""
        with self._lock:
            self._stopped = True
            for process in self._processes.values():
                process.send_signal(signal.SIGTERM)

    def generated(self, run: RunState) -> int:
        """Completion tokens of a run so far.

        Args:
            run: Of this comparison.
        """
        try:
            return int(read_run(self.out / run.folder).last("tokens/generated") or 0)
        except ValueError:
            return 0  # nothing was logged yet

    def _run_one(self, run: RunState, on_change: Callable[[RunState], None]) -> None:
        folder = self.out / run.folder
        command = [sys.executable, "-m", "lit_rlhf", "fit", "-c", str(self._write_recipe(run))]
        saved = [path for path in folder.rglob("*.ckpt") if path.stem in ("last", "interrupted")]
        if saved:
            command += ["--ckpt_path", str(max(saved, key=lambda path: path.stat().st_mtime))]
        threads = str(max(1, (os.cpu_count() or 1) // self.jobs))
        with self._lock:
            if self._stopped:
                return
            log = (folder / "console.log").open("ab")
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)},
                start_new_session=True,  # Ctrl-C reaches this process alone, which tells the others once
            )
            self._processes[run.folder] = process
            run.status, run.error = "running", None
        started, before = time.monotonic(), run.seconds
        self._write()
        on_change(run)
        process.wait()
        log.close()
        run.seconds = round(before + time.monotonic() - started, 1)
        with self._lock:
            del self._processes[run.folder]
        self._end(run, process.returncode)
        on_change(run)

    def _end(self, run: RunState, code: int) -> None:
        run.generated_tokens = self.generated(run)
        if code == 0 and run.generated_tokens >= self.token_budget:
            run.status = "done"
        elif self._stopped:
            run.status = "pending"
        else:
            run.status, run.error = "failed", _last_words(self.out / run.folder / "console.log", code)
        with atomic_file(self.out / run.folder / OUTCOME_NAME) as path:
            path.write_text(json.dumps(asdict(run), indent=1) + "\n", encoding="utf-8")
        self._write()

    def _write_recipe(self, run: RunState) -> Path:
        path = self.out / run.folder / "recipe.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(self.recipe(run), sort_keys=False), encoding="utf-8")
        return path

    def _recall(self) -> None:
        """What earlier starts have done."""
        for run in self.runs:
            run.recipe = hashlib.sha256(json.dumps(self.recipe(run), sort_keys=True, default=str).encode()).hexdigest()
            path = self.out / run.folder / OUTCOME_NAME
            if not path.exists():
                continue
            try:
                outcome = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ConfigurationError(
                    f"{path}: no outcome of a run can be read from it; remove {path.parent}"
                ) from error
            if outcome["recipe"] != run.recipe:
                raise ConfigurationError(
                    f"{path.parent} holds a run of another recipe or token budget: give another --out, or remove it"
                )
            run.seconds, run.generated_tokens = outcome["seconds"], outcome["generated_tokens"]
            if outcome["status"] == "done":
                run.status = "done"

    def _write(self) -> None:
        with self._lock:
            arms = [
                {
                    "name": arm.name,
                    "title": arm.title,
                    "runs": [
                        {key: value for key, value in asdict(run).items() if key not in ("arm", "recipe")}
                        for run in self.runs
                        if run.arm == arm.name
                    ],
                }
                for arm in self.arms.values()
            ]
            content = {"token_budget": self.token_budget, "jobs": self.jobs, "arms": arms}
            self.out.mkdir(parents=True, exist_ok=True)
            with atomic_file(self.out / COMPARISON_NAME) as path:
                path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _last_words(log: Path, code: int) -> str:
    """The error that a run ended with."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line for line in lines if line.startswith("lit-rlhf: error: ")]
    if errors:
        return errors[-1].removeprefix("lit-rlhf: error: ")
    spoken = [line.strip() for line in lines if line.strip()]
    last = spoken[-1] if spoken else "it said nothing"
    return f"exit code {code}: {last[:300]}"
