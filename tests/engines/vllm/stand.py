"""Small servers that stand in for vLLM; their answer to a row is its key."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from lit_rlhf.engines.vllm.requests import PROBE, PROBE_ANSWER, ROW_OPTIONS

KEYS = np.arange(40, dtype=np.uint64) + 100


class Stand(ThreadingHTTPServer):
    """Answers as vLLM does; ``trouble`` may say otherwise for a request."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.version = "default"
        self.loaded: list[str] = []
        self.answered: list[int] = []
        self.trouble: Any = lambda path, body: None
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Stand
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        self._answer(json.loads(self.rfile.read(length)) if length else None)

    def _answer(self, body: Any) -> None:
        stand, path = self.server, self.path
        status, said = 200, {"success": True, "weight_version": stand.version}
        if trouble := stand.trouble(path, body):
            if trouble == "hang up":
                self.close_connection = True
                self.connection.close()
                return
            status, said = trouble
        elif path == "/update_weight_version":
            stand.version = body["new_version"]
        elif path == "/collective_rpc":
            stand.loaded.append(body["kwargs"]["weights_path"])
        elif path == "/inference/v1/generate":
            row = body["sampling_params"]["extra_args"][ROW_OPTIONS]
            if PROBE in row:
                status, said = 400, {"error": PROBE_ANSWER}
            else:
                stand.answered.append(row["key"])
                choice = {
                    "token_ids": [row["key"], 2],
                    "logprobs": {"content": [{"logprob": -1.0}, {"logprob": -0.5}]},
                    "finish_reason": "stop",
                    "weight_versions": [{"version": stand.version, "start": 0, "end": 2}],
                }
                said = {"choices": [choice]}
        text = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def whole(generation: Any) -> None:
    assert generation.completion_ids.tolist() == [[key, 2] for key in KEYS.tolist()]
    assert generation.finished.all()
