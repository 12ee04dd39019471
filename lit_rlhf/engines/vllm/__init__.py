"""vLLM as the rollout engine, in the trainer's process or as servers elsewhere; imported on first use."""

from lit_rlhf.engines.vllm.colocated import VLLMEngine
from lit_rlhf.engines.vllm.servers import VLLMServers

__all__ = ["VLLMEngine", "VLLMServers"]
