"""Exported policy, written completions, and the summary of a run."""

from __future__ import annotations

import json
import re

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_rlhf import GRPOModule
from lit_rlhf.callbacks import CompletionWriter, ExportPolicy, RunSummary, StdThresholdMask, WarmupCosine


def squeezed(text):
    """Table cells without their frames and line breaks."""
    return re.sub(r"\s+", " ", re.sub("[│┃┌┐└┘┬┴─]", " ", text))


def test_the_export_has_the_trained_weights(fit, policy_dir, tmp_path):
    module = fit(None, [ExportPolicy(str(tmp_path / "out"))])
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    base = AutoModelForCausalLM.from_pretrained(policy_dir)
    pairs = list(zip(exported.parameters(), module.policy.parameters(), base.parameters(), strict=True))
    assert all(torch.equal(ours, trained) for ours, trained, _ in pairs)
    assert not all(torch.equal(ours, before) for ours, _, before in pairs)
    ids = AutoTokenizer.from_pretrained(tmp_path / "out")("12+3=").input_ids
    assert ids == module.tokenizer("12+3=").input_ids
    logits = exported(torch.tensor([ids])).logits
    assert torch.equal(logits, module.policy.eval()(torch.tensor([ids])).logits)


def test_the_default_export_is_in_the_log_folder(fit, tmp_path):
    fit()
    assert (tmp_path / "policy" / "config.json").exists()


def test_a_dry_run_exports_nothing(fit, tmp_path):
    fit(fast_dev_run=True)
    assert not (tmp_path / "policy").exists()


@pytest.mark.parametrize("own", [ExportPolicy, CompletionWriter, RunSummary, StdThresholdMask, WarmupCosine])
def test_the_trainers_own_callback_is_kept(fit, own):
    callback = own()
    module = fit(None, [callback], max_epochs=1)
    assert [other for other in module.trainer.callbacks if isinstance(other, own)] == [callback]


def test_completions_are_written_as_they_come(tmp_path, make_trainer, make_data, policy_dir, rows):
    """What was sampled before a failure is on disk."""
    seen = []

    def fails_late(completions):
        seen.append(len(completions))
        if len(seen) > 2:
            raise RuntimeError("out of luck")
        return [1.0] * len(completions)

    data = make_data(None, test=rows, rewards=fails_late, val_samples=0, val_batch_size=2)
    file = tmp_path / "out.jsonl"
    file.write_text("old\n")
    with pytest.raises(Exception, match="out of luck"):
        make_trainer(callbacks=[CompletionWriter(str(file))]).predict(GRPOModule(policy_dir), data)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["prompt"] for line in lines] == [row["prompt"] for row in rows[:4]]


def test_letters_beyond_ascii_are_written_as_they_are(tmp_path, make_trainer, make_data, policy_dir):
    data = make_data(None, test=[{"prompt": "7+7=", "note": "x"}], val_samples=0)
    writer = CompletionWriter(str(tmp_path / "out.jsonl"))
    make_trainer(callbacks=[writer]).predict(GRPOModule(policy_dir), data)
    writer.write_on_batch_end(None, None, [{"completion": "3 € 🙂\n中"}], None, None, 0, 0)
    last = (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()[-1]
    assert last == '{"completion": "3 € 🙂\\n中"}'


def test_the_banner(fit, make_data, capsys, policy_dir, rows):
    data = make_data(val=rows[:2], passes=2, steps_per_pass=3, micro_batch_size=4, temperature=0.7, top_k=5)
    fit(data, max_epochs=2)
    banner = squeezed(capsys.readouterr().out.split("results")[0])
    for part in (
        "algorithm GRPOModule",
        "16.5 k parameters, 16.5 k trainable",
        "reference a frozen copy of the policy at the start",
        "prompts 6 in ",
        "rewards share_of_digits",
        "6 prompts x 4 = 24 completions, at most 144 new tokens; 6 optimizer steps, 2 micro-batches each",
        "run 12 optimizer steps",
        "temperature 0.7, top-p 1, top-k 5, at most 6 new tokens, ends at ids (1,)",
        "KL in the reward, coefficient 0.04",
        "clip [0.8, 1.2]",
    ):
        assert part in banner
    assert policy_dir.replace("/", "") in banner.replace(" ", "").replace("/", "")


def test_the_banner_without_a_reference(fit, capsys):
    fit(max_epochs=1, module={"kl_coef": 0.0})
    banner = squeezed(capsys.readouterr().out)
    assert "reference none (kl_coef is 0)" in banner
    assert "1 optimizer step, 1 micro-batch each" in banner


def test_what_was_reached(fit, make_data, capsys, watch, rows, tmp_path):
    keep = ModelCheckpoint(tmp_path / "kept", every_n_epochs=1, save_on_train_epoch_end=True)
    module = fit(make_data(val=rows), [keep], module={"lr": 3e-2}, enable_checkpointing=True)
    results = squeezed(capsys.readouterr().out.split("results")[1])
    for name in ("accuracy", "sampled_accuracy", "pass@2", "reward", "completion_length", "truncated"):
        before, after = module.initial_metrics[f"val/{name}"], watch.final[f"val/{name}"]
        assert f"val/{name} {before:.4g} -> {after:.4g}" in results
    assert "val/accuracy_low" in watch.final
    assert "_low" not in results
    generated = sum(int(rollout.completion_lengths.sum()) for rollout in watch.rollouts)
    live = [rollout.select((rollout.advantages != 0).any(dim=1)) for rollout in watch.rollouts]
    trained = sum(int((rows.prompt_lengths + rows.completion_lengths).sum()) for rows in live)
    assert f"tokens {generated:,} generated, {trained:,} trained" in results
    assert f"reward (last iteration) {watch.final['reward']:.4g}" in results
    assert "health no warning" in results
    for part in ("time/generation", "time/training", "checkpoint", "exported policy"):
        assert part in results
