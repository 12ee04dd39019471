"""Engines by name, with the options they have by default."""

from __future__ import annotations

from typing import Literal

from lit_rlhf.engines.base import RolloutEngine
from lit_rlhf.engines.transformers import TransformersEngine
from lit_rlhf.engines.vllm import VLLMEngine
from lit_rlhf.errors import check_choice


def make_engine(engine: RolloutEngine | Literal["transformers", "vllm"] | None) -> RolloutEngine:
    """The engine that is meant.

    Args:
        engine: One, or a name; without either the policy samples for itself.

    >>> type(make_engine("transformers")).__name__
    'TransformersEngine'
    """
    if engine is None or isinstance(engine, str):
        name = engine or "transformers"
        check_choice("engine", name, ("transformers", "vllm"))
        return VLLMEngine() if name == "vllm" else TransformersEngine()
    return engine
