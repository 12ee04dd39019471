from __future__ import annotations

import json

import pytest
from peft import LoraConfig

from lit_rlhf.errors import ConfigurationError
from lit_rlhf.models.lora_config import lora_options


def test_a_mapping_is_taken_as_it_is():
    given = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "use_rslora": True}
    assert lora_options(given) == given


def test_the_rank_has_pefts_default():
    assert lora_options({"use_dora": True})["r"] == LoraConfig().r


@pytest.mark.parametrize("whole_folder", [True, False])
def test_what_peft_saved_is_read(tmp_path, whole_folder):
    LoraConfig(r=6, lora_alpha=3, lora_dropout=0.1, target_modules=["v_proj"], use_dora=True).save_pretrained(tmp_path)
    found = lora_options(tmp_path if whole_folder else str(tmp_path / "adapter_config.json"))
    expected = {"r": 6, "lora_alpha": 3, "target_modules": ["v_proj"], "use_dora": True}
    assert {name: found[name] for name in expected} == expected
    assert "lora_dropout" not in found
    again = LoraConfig(**found)
    assert (again.r, again.lora_alpha, again.use_dora, again.lora_dropout) == (6, 3, True, 0.0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"lora_dropout": 0.05}, "lora_dropout must be 0"),
        ({"bias": "all"}, "bias must be 'none'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights must be true or 'gaussian', got 'pissa'"),
        ({"init_lora_weights": False}, "got False"),
        ({"peft_type": "IA3"}, "a LoRA adapter is wanted, this is one of type IA3"),
        ({"r": 0}, r"r must be a number in \[1, inf\), got 0"),
        ({"use_rslroa": False}, "use_rslroa cannot be used here; there are r, lora_alpha"),
        ({"lora_bias": True}, "lora_bias cannot be used here"),
    ],
)
def test_what_would_break_the_reference_is_refused(config, message):
    with pytest.raises(ConfigurationError, match=message):
        lora_options(config)


def test_files_that_are_none(tmp_path):
    with pytest.raises(ConfigurationError, match="no adapter can be read there"):
        lora_options(tmp_path / "nowhere")
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ConfigurationError, match="no JSON"):
        lora_options(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps([1]))
    with pytest.raises(ConfigurationError, match="holds a list"):
        lora_options(tmp_path)
