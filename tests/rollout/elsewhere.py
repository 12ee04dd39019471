"""An engine on devices of its own, without the devices: it samples late, with a copy of the weights it was given."""

from __future__ import annotations

import copy
from typing import Any

from lit_rlhf.engines import Generation, TransformersEngine


class Later:
    """Sampled when it is asked for."""

    def __init__(self, engine: Elsewhere, policy: Any, arguments: tuple[Any, ...]) -> None:
        self.engine = engine
        self.policy = policy
        self.arguments = arguments
        self.generation: Generation | None = None

    def result(self, patience: float | None = None) -> Generation:
        if self.generation is None:
            self.engine.events.append("finish")
            self.generation = TransformersEngine.generate(self.engine, self.policy, *self.arguments)
        return self.generation

    def cancel(self) -> None:
        if self.generation is None:
            self.engine.events.append("cancel")


class Elsewhere(TransformersEngine):
    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def generate(self, policy: Any, *arguments: Any, **options: Any) -> Generation:
        self.events.append("generate")
        return super().generate(policy, *arguments, **options)

    def start(self, policy: Any, *arguments: Any) -> Later:
        self.events.append("start")
        return Later(self, copy.deepcopy(policy), arguments)
