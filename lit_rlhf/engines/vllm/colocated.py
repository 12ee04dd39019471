"""vLLM in the trainer's own process, on the trainer's own device."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import nn

from lit_rlhf.engines.base import Generation, SamplingParams, check_request
from lit_rlhf.engines.vllm.adapter import adapter_room, adapter_weights, write_adapter
from lit_rlhf.engines.vllm.requests import LOGPROBS_MODE, ROW_SAMPLER, Answer, as_generation, request_options
from lit_rlhf.engines.vllm.skeleton import same_architecture, write_skeleton
from lit_rlhf.engines.vllm.weights import (
    base_weights,
    checkpoint_weights,
    is_sharded,
    same_base,
    weights_version,
)
from lit_rlhf.errors import ConfigurationError, check_choice, check_number, reason_of
from lit_rlhf.models.lora import is_adapted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DTYPES = ("auto", "float32", "bfloat16", "float16")

# What vLLM reads from the environment; whoever sets one of these keeps it.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process, where the weights are
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the one whose logits processors the row sampler is written for
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer's threads stay where they are
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_LOGGING_LEVEL": "ERROR",  # it would warn of every hand-over
}


class VLLMEngine:
    """Samples with vLLM in the trainer's process; the weights are handed over whenever they have changed.

    vLLM is built at the first rollout, from the policy's configuration alone: its weights are always those of the
    policy. The same keys give the same completions as with the transformers engine, up to rounding.

    Args:
        max_rows: Completions decoded at once (vLLM's ``max_num_seqs``).
        max_model_len: Longest prompt and completion together; the model's context by default.
        gpu_memory_utilization: Share of the GPU's memory that vLLM may take, weights included.
        dtype: What vLLM computes in; ``auto`` is the policy's own.
        lora: How an adapter reaches vLLM: ``merged`` into the weights, layer by layer, which any adapter can; or as an
            ``adapter`` of its own on the base that vLLM keeps, so that only the adapter is handed over.
        sleep: Give vLLM's GPU memory back between rollouts, its weights waiting in the CPU's memory.
        enforce_eager: Do not compile the model or capture CUDA graphs; always so on a CPU.
        options: Further ones of ``vllm.LLM`` by name.
    """

    def __init__(
        self,
        max_rows: int = 256,
        max_model_len: int | None = None,
        gpu_memory_utilization: float = 0.3,
        dtype: str = "auto",
        lora: Literal["merged", "adapter"] = "merged",
        sleep: bool = False,
        enforce_eager: bool = False,
        options: dict[str, Any] | None = None,
    ) -> None:
        check_number("VLLMEngine: max_rows", max_rows, minimum=1)
        check_number("VLLMEngine: max_model_len", max_model_len, minimum=2)
        check_number("VLLMEngine: gpu_memory_utilization", gpu_memory_utilization, above=0, maximum=1)
        check_choice("VLLMEngine: dtype", dtype, _DTYPES)
        check_choice("VLLMEngine: lora", lora, ("merged", "adapter"))
        self.max_rows = max_rows
        self.max_model_len = max_model_len
        self.gpu_memory_utilization = gpu_memory_utilization
        self.dtype = dtype
        self.lora = lora
        self.sleep = sleep
        self.enforce_eager = enforce_eager
        self.options = options or {}
        self.version: str | None = None
        self._llm: Any = None
        self._asleep = False
        self._config: Any = None
        self._adapters: tempfile.TemporaryDirectory[str] | None = None
        self._adapter: Any = None

    def check_installed(self) -> None:
        """Refuse to go on without vLLM; see :class:`lit_rlhf.engines.base.RolloutEngine`."""
        require_vllm()

    @torch.no_grad()
    def generate(
        self,
        policy: nn.Module,
        prompts: Sequence[Sequence[int]],
        num_samples: int,
        sampling: SamplingParams,
        keys: np.ndarray,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> Generation:
        """See :class:`lit_rlhf.engines.base.RolloutEngine`."""
        check_request(prompts, num_samples, keys)
        if sampling.stop and tokenizer is None:
            raise ConfigurationError("stop strings need the policy's tokenizer")
        device = next(policy.parameters()).device
        with self._awake(policy, tokenizer, device):
            # Only :meth:`prepare` is called on all processes, without which shards cannot be read.
            version = self.version if is_sharded(policy) else self._bring_up_to_date(policy)
            answers = self._answers(prompts, num_samples, sampling, keys)
        assert version is not None
        return as_generation(answers, version, sampling, device)

    @torch.no_grad()
    def prepare(self, policy: nn.Module, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Build vLLM, hand sharded weights over; see :class:`lit_rlhf.engines.base.RolloutEngine`."""
        if self._llm is not None and not is_sharded(policy):
            return  # what is left to do no process needs others for
        with self._awake(policy, tokenizer, next(policy.parameters()).device, stays=True):
            self._bring_up_to_date(policy)

    def _bring_up_to_date(self, policy: nn.Module) -> str:
        version = weights_version(policy, separate=self.lora == "adapter" and is_adapted(policy))
        if version != self.version:
            self._hand_over(policy, version)
        return version

    def _hand_over(self, policy: nn.Module, version: str) -> None:
        """Give vLLM the policy's weights."""
        before, self.version = self.version, None  # what it has from here on is neither the old nor the new
        if self._adapters is None:
            self._load(checkpoint_weights(policy))
        else:
            if not same_base(before, version):
                self._load(base_weights(policy))
            self._adapter = self._new_adapter(policy)
        self._llm.reset_prefix_cache()
        self._llm.update_weight_version(version)
        self.version = version

    def _new_adapter(self, policy: nn.Module) -> Any:
        """The adapter as it is now, under a number that vLLM has not seen."""
        from vllm.lora.request import LoRARequest

        assert self._adapters is not None
        number = 1
        if self._adapter is not None:
            number = self._adapter.lora_int_id + 1
            shutil.rmtree(self._adapter.lora_path)
        folder = Path(self._adapters.name) / str(number)
        write_adapter(policy, adapter_weights(policy), folder)
        return LoRARequest(f"policy-{number}", number, str(folder))

    def _load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})

    def _answers(
        self, prompts: Sequence[Sequence[int]], num_samples: int, sampling: SamplingParams, keys: np.ndarray
    ) -> list[Answer]:
        from vllm import SamplingParams as VLLMSamplingParams

        # A request for each row; what rows have in common, their prompt above all, vLLM finds in its prefix cache.
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts for _ in range(num_samples)]
        params = [VLLMSamplingParams(**request_options(sampling, key)) for key in keys.tolist()]
        outputs = self._llm.generate(asked, params, use_tqdm=False, lora_request=self._adapter) if asked else []
        return [_answer(output.outputs[0]) for output in outputs]

    @contextlib.contextmanager
    def _awake(
        self, policy: nn.Module, tokenizer: PreTrainedTokenizerBase | None, device: torch.device, stays: bool = False
    ) -> Iterator[None]:
        """Build vLLM if need be and keep its memory in place for the block, or for longer."""
        sleeps = self.sleep and device.type == "cuda"
        with _left_alone(device):
            if self._llm is None:
                self._build(policy, tokenizer, device)
            elif self._asleep:
                self._llm.wake_up()
                self._asleep = False
            if not same_architecture(self._config, policy):
                raise ConfigurationError("this VLLMEngine was built for another model: give each model its own engine")
            # What vLLM compiles for the ranks of log-probs takes longer than it can ever save on a CPU.
            with torch.compiler.set_stance("force_eager") if device.type == "cpu" else contextlib.nullcontext():
                yield
            if sleeps and not stays:
                self._llm.sleep(level=1)
                self._asleep = True

    def _build(self, policy: nn.Module, tokenizer: PreTrainedTokenizerBase | None, device: torch.device) -> None:
        require_vllm()
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from vllm import LLM

        options: dict[str, Any] = {
            "max_num_seqs": self.max_rows,
            "max_model_len": self.max_model_len,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "enforce_eager": self.enforce_eager or device.type == "cpu",
            "enable_sleep_mode": self.sleep and device.type == "cuda",
        }
        if self.lora == "adapter" and is_adapted(policy):
            options.update(enable_lora=True, max_lora_rank=adapter_room(policy), max_loras=1, max_cpu_loras=1)
            self._adapters = tempfile.TemporaryDirectory(prefix="lit_rlhf_adapter_")
        if _world_size() > 1:
            options["distributed_executor_backend"] = "external_launcher"
        dtype = str(next(policy.parameters()).dtype).removeprefix("torch.") if self.dtype == "auto" else self.dtype
        with tempfile.TemporaryDirectory(prefix="lit_rlhf_vllm_") as folder, _launched(device):
            self._config = write_skeleton(policy, tokenizer, folder)
            try:
                self._llm = LLM(
                    model=folder,
                    dtype=dtype,
                    load_format="dummy",
                    generation_config="vllm",
                    skip_tokenizer_init=tokenizer is None,
                    logits_processors=[ROW_SAMPLER],
                    logprobs_mode=LOGPROBS_MODE,
                    async_scheduling=False,
                    **{**options, **self.options},
                )
            except (ValueError, TypeError) as error:
                raise ConfigurationError(
                    f"VLLMEngine: vLLM refuses this model or these options: {reason_of(error)}"
                ) from error


def require_vllm() -> None:
    """Refuse to go on without vLLM, before any model is loaded.

    Raises:
        ConfigurationError: Saying what to install.
    """
    from importlib.util import find_spec

    if find_spec("vllm") is None:
        raise ConfigurationError(
            "this engine needs vLLM, which is not installed: pip install 'lit-rlhf[vllm]', or sample with the default "
            "engine"
        )


def _answer(output: Any) -> Answer:
    """A completion of vLLM's."""
    ids = list(output.token_ids)
    log_probs = [found[token].logprob for token, found in zip(ids, output.logprobs or [], strict=True)]
    versions = frozenset(span.version for span in output.weight_versions or [])
    return Answer(ids, log_probs, output.finish_reason, versions)


@contextlib.contextmanager
def _left_alone(device: torch.device) -> Iterator[None]:
    """Random states and settings of the process are afterwards what they were: vLLM sets them for itself."""
    states = random.getstate(), np.random.get_state()
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_num_threads = set_num_threads
            torch.set_num_threads(num_threads)


@contextlib.contextmanager
def _launched(device: torch.device) -> Iterator[None]:
    """Tell vLLM who this process is among those that train together, in the variables that torchrun would set."""
    if _world_size() == 1:
        yield
        return
    rank = torch.distributed.get_rank()
    given = {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK")}
    os.environ["RANK"] = str(rank)
    os.environ["LOCAL_RANK"] = str(rank if device.index is None else device.index)
    try:
        yield
    finally:
        for name, value in given.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _world_size() -> int:
    """Processes that train together; vLLM itself makes a group of one where there is none."""
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if ready else 1
