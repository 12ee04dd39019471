"""One vLLM server: what is asked of it over HTTP, and what its answers mean."""

from __future__ import annotations

import http.client
import json
import threading
from typing import Any
from urllib.parse import urlsplit

from lit_rlhf.engines.base import SamplingParams
from lit_rlhf.engines.vllm.requests import PROBE, PROBE_ANSWER, ROW_OPTIONS, Answer, request_options
from lit_rlhf.errors import ConfigurationError, EngineError

_HOW_TO_START = "start it with: python -m lit_rlhf.engines.vllm MODEL"


class ReplicaLostError(Exception):
    """The server does not answer, or not as one that works; it may be back later."""


class Replica:
    """A server at an address. Each thread has a connection of its own, which is kept open.

    Args:
        url: Such as ``http://host:8000``.
        timeout: Longest time to wait for an answer, in seconds.
    """

    def __init__(self, url: str, timeout: float) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/"):
            raise ConfigurationError(f"VLLMServers: urls must look like http://host:8000, got {url!r}")
        self.address = parts.hostname, parts.port or 8000
        self.timeout = timeout
        self.lock = threading.Lock()
        """Held by the thread that changes its weights."""
        self._local = threading.local()

    def __str__(self) -> str:
        return f"http://{self.address[0]}:{self.address[1]}"

    def healthy(self) -> bool:
        """Whether it answers."""
        try:
            self._call("GET", "/health", timeout=min(5.0, self.timeout))
        except ReplicaLostError:
            return False
        return True

    def check(self) -> None:
        """Make sure that rows are drawn by the row sampler: without it they would be greedy ones.

        Raises:
            ConfigurationError: The server was not started for this.
        """
        params = {"temperature": 0.0, "max_tokens": 1, "extra_args": {ROW_OPTIONS: {PROBE: True}}}
        try:
            self._call("POST", "/inference/v1/generate", {"token_ids": [0], "sampling_params": params})
        except EngineError as error:
            if PROBE_ANSWER in str(error):
                return
            raise ConfigurationError(f"{error}; {_HOW_TO_START}") from error
        raise ConfigurationError(f"the vLLM server at {self} does not sample as rollouts need it; {_HOW_TO_START}")

    def version(self) -> str:
        """Label of the weights that it has."""
        try:
            return str(self._call("GET", "/weight_info")["weight_version"])
        except EngineError as error:
            raise ConfigurationError(f"{error}; {_HOW_TO_START}") from error

    def load(self, folder: str) -> None:
        """Take the weights in a folder.

        Args:
            folder: With a checkpoint, at a place where the server finds it too.
        """
        self._call("POST", "/update_weight_version", {"new_version": "being replaced"})
        self._call("POST", "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})

    def load_adapter(self, name: str, folder: str) -> None:
        """Take an adapter as one more.

        Args:
            name: By which requests ask for it.
            folder: With a peft adapter, at a place where the server finds it too.
        """
        self._call("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder, "load_inplace": True})

    def finish(self, version: str) -> None:
        """Forget what was computed with the old weights, and label the new ones.

        Args:
            version: The label.
        """
        if not self._call("POST", "/reset_prefix_cache")["success"]:
            raise ReplicaLostError(f"{self} is busy with requests of others, which hold on to its old weights")
        self._call("POST", "/update_weight_version", {"new_version": version})

    def complete(self, prompt: list[int], sampling: SamplingParams, key: int, model: str | None) -> Answer:
        """One completion.

        Args:
            prompt: Token ids.
            sampling: How.
            key: All the randomness of the row.
            model: Name of the adapter, if there is one.
        """
        request: dict[str, Any] = {"token_ids": prompt, "sampling_params": request_options(sampling, key)}
        if model is not None:
            request["model"] = model
        choice = self._call("POST", "/inference/v1/generate", request)["choices"][0]
        log_probs = [found["logprob"] for found in choice["logprobs"]["content"]]
        versions = frozenset(span["version"] for span in choice["weight_versions"] or [])
        if choice["finish_reason"] not in ("stop", "length"):
            raise ReplicaLostError(f"{self} ended a completion with {choice['finish_reason']}")  # it is going down
        return Answer(choice["token_ids"], log_probs, choice["finish_reason"], versions)

    def _call(self, method: str, path: str, body: Any = None, timeout: float | None = None) -> Any:
        text = None if body is None else json.dumps(body)
        kept = getattr(self._local, "connection", None)
        self._local.connection = None
        try:
            if kept is None or timeout is not None:
                raise ConnectionError("a new connection is needed")
            status, content = self._exchange(kept, method, path, text)  # which the server may have closed meanwhile
        except TimeoutError as error:
            raise ReplicaLostError(f"{self} has not answered {path} for {self.timeout:g} s") from error
        except (OSError, http.client.HTTPException):
            new = http.client.HTTPConnection(*self.address, timeout=timeout or self.timeout)
            try:
                status, content = self._exchange(new, method, path, text)
            except (OSError, http.client.HTTPException) as error:
                raise ReplicaLostError(f"{self}: {type(error).__name__} {error}".strip()) from error
        if timeout is not None:
            self._local.connection = None  # it would go on with that time limit
        said = content[:500].decode(errors="replace")
        if status >= 500:
            raise ReplicaLostError(f"{self} answered {path} with {status}: {said}")
        if status >= 400:
            raise EngineError(f"the vLLM server at {self} refused {path} with {status}: {said}")
        return json.loads(content) if content.startswith((b"{", b"[")) else None  # some answers are but a sentence

    def _exchange(
        self, connection: http.client.HTTPConnection, method: str, path: str, text: str | None
    ) -> tuple[int, bytes]:
        """Ask and read the answer; the connection is kept only where that went well."""
        try:
            connection.request(method, path, text, {} if text is None else {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.status, response.read()
        except BaseException:
            connection.close()
            raise
        self._local.connection = connection
        return answer
