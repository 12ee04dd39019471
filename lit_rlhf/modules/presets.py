"""Published variants and other libraries' conventions, each as a few options of the one loss.

``GRPOModule(..., numerics="dapo")`` sets the options of one row; an option that is given wins over it. What a row does
not name keeps the value in :data:`DEFAULTS`. Equations and what to watch: ``docs/variants.md``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lit_rlhf.errors import check_choice

Numerics = Literal[
    "grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "gspo", "cispo", "trl", "verl", "openrlhf", "open_instruct"
]

DEFAULTS: dict[str, Any] = {
    # the advantage
    "baseline": "mean",
    "advantage_scale": "group",
    "std_eps": 1e-4,
    "std_ddof": 0,
    "decomposition": "sequence",
    "whiten_advantages": False,
    # the KL penalty
    "kl_coef": 0.04,
    "kl_placement": "reward",
    "kl_estimator": "k3",
    "kl_gradient": "ratio",
    # the surrogate
    "ratio": "token",
    "surrogate": "clip",
    "clip_range": 0.2,
    "clip_range_high": None,  # as clip_range
    "dual_clip": 0.0,
    # which tokens count, and how much
    "loss_aggregation": "token_mean",
    "mask_truncated": False,
    "top_entropy_share": 1.0,
    "sampling_correction": "off",
}


@dataclass(frozen=True)
class Preset:
    """Options of one paper or library.

    Args:
        source: Where the numbers come from.
        options: What it sets.
        note: What belongs to it and is no option of the module.
    """

    source: str
    options: Mapping[str, Any]
    note: str = ""


# Papers print no eps: equal rewards have an advantage of 0 without one. None says which deviation it means: the
# population's here. The libraries take Bessel's, but for open-instruct.
PRESETS: dict[str, Preset] = {
    "grpo": Preset(
        "DeepSeekMath, arXiv 2402.03300, eq. 3 and 4",
        {
            "std_eps": 0.0,
            "kl_placement": "loss",
            "kl_gradient": "plain",
            "loss_aggregation": "sequence_mean",
        },
    ),
    "dr_grpo": Preset(
        "Understanding R1-Zero-Like Training, arXiv 2503.20783",
        {"advantage_scale": "none", "kl_coef": 0.0, "loss_aggregation": "constant"},
    ),
    "dapo": Preset(
        "DAPO, arXiv 2503.14476, eq. 8",
        {"std_eps": 0.0, "kl_coef": 0.0, "clip_range": 0.2, "clip_range_high": 0.28},
        note="add DynamicSampling to the callbacks and a soft overlong penalty to the rewards",
    ),
    "rloo": Preset(
        "Back to Basics, arXiv 2402.14740",
        {"baseline": "leave_one_out", "advantage_scale": "none", "loss_aggregation": "sequence_sum"},
    ),
    "reinforce_pp": Preset(
        "REINFORCE++, arXiv 2501.03262",
        {
            "baseline": "none",
            "advantage_scale": "none",
            "decomposition": "return_to_go",
            "whiten_advantages": True,
        },
    ),
    "gspo": Preset(
        "Group Sequence Policy Optimization, arXiv 2507.18071, eq. 5 and 7",
        {
            "std_eps": 0.0,
            "kl_coef": 0.0,
            "ratio": "sequence",
            "clip_range": 3e-4,
            "clip_range_high": 4e-4,
            "loss_aggregation": "sequence_mean",
        },
    ),
    "cispo": Preset(
        "MiniMax-M1, arXiv 2506.13585; the cap of 5, which it does not give, from ScaleRL, arXiv 2510.13786",
        {"std_eps": 0.0, "kl_coef": 0.0, "surrogate": "clipped_weight", "clip_range": 1.0, "clip_range_high": 4.0},
    ),
    "trl": Preset(
        "TRL 1.16, GRPOTrainer with its defaults",
        {"std_ddof": 1, "kl_coef": 0.0, "kl_placement": "loss"},
        note="with vLLM it also sets sampling_correction: sequence_mask, sampling_weight_max: 3",
    ),
    "verl": Preset(
        "verl 0.9.1, adv_estimator=grpo with its defaults",
        {
            "std_eps": 1e-6,
            "std_ddof": 1,
            "kl_coef": 0.0,
            "kl_placement": "loss",
            "kl_gradient": "plain",
            "dual_clip": 3.0,
        },
        note="its use_kl_loss is kl_coef: 0.001",
    ),
    "openrlhf": Preset(
        "OpenRLHF 0.11.2, group_norm with its defaults",
        {
            "std_eps": 1e-9,
            "std_ddof": 1,
            "decomposition": "return_to_go",
            "kl_coef": 0.01,
            "kl_placement": "after",
        },
    ),
    "open_instruct": Preset(
        "open-instruct, grpo_fast with its defaults",
        {
            "advantage_scale": "none",
            "kl_coef": 0.05,
            "kl_placement": "loss",
            "kl_gradient": "plain",
            "clip_range": 0.2,
            "clip_range_high": 0.272,
            "sampling_correction": "token_truncate",
        },
        note="it leaves groups without a difference out of the batch: DynamicSampling draws others for them",
    ),
}


def choose(numerics: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """The value of each option: the one given, else the preset's, else the default.

    Args:
        numerics: Name of a preset, or none.
        given: Options of :data:`DEFAULTS`; ``None`` is not given.

    Raises:
        ConfigurationError: There is no such preset.
    """
    values = {**DEFAULTS, **_preset_options(numerics, given)}
    return {name: values[name] if value is None else value for name, value in given.items()}


def complete(numerics: str | None, options: Mapping[str, Any], without: Collection[str] = ()) -> dict[str, Any]:
    """Options as they are, and the preset's where none was given.

    Args:
        numerics: Name of a preset, or none.
        options: Any keyword arguments; ``None`` is not given.
        without: Options of the preset that are somebody else's.
    """
    preset = {name: value for name, value in _preset_options(numerics, options).items() if name not in without}
    return {**options, **{name: value for name, value in preset.items() if options.get(name) is None}}


def _preset_options(numerics: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    if numerics is None:
        return {}
    check_choice("numerics", numerics, tuple(PRESETS))
    options = dict(PRESETS[numerics].options)
    if given.get("kl_placement") not in (None, options.get("kl_placement")):
        # How a KL term is differentiated means nothing where it is no term of the loss.
        options.pop("kl_gradient", None)
    return options
