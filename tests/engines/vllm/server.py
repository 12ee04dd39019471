"""A vLLM server in a process of its own, which tests may kill."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any


class Server:
    """Serves a folder's model at a free port, which it keeps when it is started again."""

    def __init__(self, model: str | Path, log: Path, *arguments: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [sys.executable, "-m", "lit_rlhf.engines.vllm", str(model), "--port", str(self.port)]
        self.command += ["--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-model-len", "64"]
        self.command += arguments
        self.log = log
        self.process: Any = None

    def start(self) -> None:
        environment = {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "TORCH_COMPILE_DISABLE": "1",  # it would take longer than the tests
            "OMP_NUM_THREADS": "1",
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def wait(self) -> None:
        """Until it answers."""
        while self.process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return
            except OSError:
                time.sleep(0.5)
        raise AssertionError(self.log.read_text(errors="replace")[-3000:])

    def kill(self) -> None:
        """With everything that it has started, as a lost machine would be."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
