"""Several recipes on equal terms: the same prompts, rewards, sampling and number of generated tokens."""

from lit_rlhf.compare.arms import ArmRecipe, arm_recipes
from lit_rlhf.compare.runs import ComparisonRuns, RunState

__all__ = ["ArmRecipe", "ComparisonRuns", "RunState", "arm_recipes"]
