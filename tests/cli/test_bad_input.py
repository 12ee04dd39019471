"""Whatever is wrong with a recipe, a command line or a file: one message that says what and where, and no training."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lit_rlhf.cli import main

CALLBACK = '--trainer.callbacks+={{"class_path": "{}", "init_args": {{{}}}}}'
REWARD = '--data.rewards=[{{"class_path": "lit_rlhf.rewards.{}", "init_args": {{{}}}}}]'

# Name, options after `fit -c recipe.yaml` in words, and what the message has to say. {w} is the folder of bad files.
OPTIONS = """
model-option | --model.klcoef 0.1 | GRPOModule has no option 'klcoef'; did you mean 'kl_coef'?
model-class | --model GRPOModul | no class 'GRPOModul'; did you mean 'GRPOModule'?
model-module | --model nosuch.GRPOModule | model: there is no module 'nosuch'
model-kind | --model lit_rlhf.RolloutDataModule | this class is no LightningModule
data-option | --data.init_args.group_sise 4 | no option 'group_sise'; did you mean 'group_size'?
trainer-option | --trainer.max_epoch 3 | no option 'max_epoch'; did you mean 'max_epochs'?
top-option | --modle.lr 1 | no option --modle.lr; did you mean --model.lr?
stray-word | lr=3 | 'lr=3' belongs to no option
no-value | --model.lr | needs a value
literal | --model.kl_placement los | model.kl_placement must be one of 'reward',
literal-data | --data.on_reward_error skip | data.on_reward_error must be one of 'raise', 'abstain', got 'skip'
format | --data.format gsm9k | data.format must be one of
precision | --trainer.precision bf17 | did you mean 'bf16'?
number | --model.lr high | model.lr must be a number, got 'high'
whole-number | --data.group_size 2.5 | data.group_size must be a whole number, got '2.5'
truth | --data.shuffle maybe | data.shuffle must be true or false, got 'maybe'
null | --data.group_size null | data.group_size must have a value, got null
null-rate | --model.lr null | model.lr must have a value, got null
tuple | --model.betas [0.9] | model.betas must be a tuple with 2 elements
reward-name | --data.rewards [lit_rlhf.rewards.ExactMach] | there is no lit_rlhf.rewards.ExactMach; did you mean
verifier | --data.verifier nope.f | data.verifier: there is no module 'nope'
strategy | --trainer.strategy ddpp | invalid strategy name: `strategy='ddpp'`
accelerator | --trainer.accelerator cuda9 | trainer: You selected an invalid accelerator name
devices | --trainer.devices 0 | `Trainer(devices='0')` value is not a valid input
fsdp-on-cpu | --trainer.strategy fsdp | strategy `fsdp` requires a GPU accelerator
gradient-clip | --trainer.gradient_clip_val -1 | gradient_clip_val must be 0 (off) or positive, got -1
true-bfloat16 | --trainer.precision bf16-true | precision=bf16-true converts what sampler and trainer must share
stale-rollouts | --trainer.reload_dataloaders_every_n_epochs 2 | write Trainer(reload_dataloaders_every_n_epochs=1)
half-a-rollout | --trainer.limit_train_batches 0.5 | limit_train_batches=0.5 would throw away part of every rollout
half-an-iteration | --trainer.max_steps 3 --data.passes 2 | max_steps=3 would end inside an iteration of 2
endless | --trainer.max_epochs -1 | WarmupCosine needs the length of the run
accumulate | --trainer.accumulate_grad_batches 2 --data.micro_batch_size 2 | accumulate_grad_batches=2 cuts each
no-prompts | --data.prompts_per_iteration 0 | prompts_per_iteration must be at least 1, got 0
group-of-one | --data.group_size 1 | group_size must be at least 2, got 1
too-many-steps | --data.steps_per_pass 7 | steps_per_pass=7 optimizer steps cannot share prompts_per_iteration=3
passes | --data.passes 0 | passes must be at least 1, got 0
two-batch-sizes | --data.micro_batch_size 2 --data.micro_batch_tokens 9 | give micro_batch_size or
greedy | --data.temperature 0 | temperature 0 is greedy
temperature | --data.temperature -1 | temperature must be 0 (greedy) or positive, got -1.0
top-p | --data.top_p 1.5 | top_p must be in (0, 1]; 1 is off, got 1.5
top-k | --data.top_k -1 | top_k must be 0 (off) or positive, got -1
no-new-tokens | --data.max_new_tokens 0 | max_new_tokens must be at least 1, got 0
context | --data.max_new_tokens 80 | more than the model's context of 64
pass-at-k | --data.pass_k [3] | pass_k=3 needs at least 3 val_samples, got 2
seed | --data.seed -1 | seed must be 0 or positive, got -1
weights | --data.reward_weights [1,2] | 1 reward functions, but 2 reward weights
no-rewards | --data.rewards [] | No reward functions were given
column | --data.prompt_column question | there is no column 'question'. It has 'prompt', 'answer'
template | --data.prompt_template {{{{question}}}} | 'question' is undefined
system-prompt | --data.system_prompt short | train.jsonl, line 1: `system_prompt` is set
all-too-long | --data.max_prompt_length 1 | 6 of 6 prompts longer than 1 tokens refused
no-train | --data.train null | fit needs training prompts
no-file | --data.train {w}/nope.jsonl | nope.jsonl: no such file
no-val-file | --data.val {w}/nope.jsonl | nope.jsonl: no such file
kind-of-file | --data.train {w}/prompts.docx | prompts.docx: unknown kind of file
empty-file | --data.train {w}/empty.jsonl | empty.jsonl: is empty
empty-folder | --data.train {w}/folder | folder: the folder has no data file
json | --data.train {w}/broken.jsonl | broken.jsonl, line 2: not JSON
null-prompt | --data.train {w}/null.jsonl | null.jsonl, line 2, column 'prompt': the prompt is missing
no-answers | --data.train {w}/no_answers.jsonl | Reward `exact_match` needs the column 'answer'
no-chat-template | --data.train {w}/chat.jsonl | the tokenizer has no chat template
no-policy | --model.policy {w}/no/such | Cannot load a tokenizer from
no-tokenizer | --model.policy {w}/no_tokenizer | Cannot load a tokenizer from
broken-config | --model.policy {w}/broken_config | not a valid JSON file
cut-weights | --model.policy {w}/cut_weights | Cannot load a causal language model from
attention | --model.attn_implementation flash_9 | `attn_implementation="flash_9"` is not supported
dtype | --model.dtype int4 | dtype must be one of float32, bfloat16, float16, got 'int4'
clip-range | --model.clip_range -0.1 | clip_range must be a number in [0, 1
random-weights | --model.random_init true | leave random_init off
lora-rank | --model.lora_rank -1 | lora_rank must be a number in [0, inf), got -1
lora-target | --model.lora_rank 2 --model.lora_target_modules [nope] | lora_target_modules=['nope'] cannot be adapted
wrong-pair | --model SFTModule --model.policy {p} | RolloutDataModule makes rollouts for PPOModule and GRPOModule
critic | --model PPOModule --model.policy {p} --model.critic adapter | critic='adapter' sits on the policy's frozen base
root-is-a-file | --trainer.default_root_dir {w}/a_file | output folder {w}/a_file cannot be written to
no-checkpoint | --ckpt_path {w}/nope.ckpt | nope.ckpt: there is no such checkpoint
no-last | --ckpt_path last | ckpt_path: last finds no checkpoint in
empty-checkpoint | --ckpt_path {w}/empty.ckpt | empty.ckpt: the file is empty
text-checkpoint | --ckpt_path {w}/a_file | a_file: this is no checkpoint of PyTorch's
cut-checkpoint | --ckpt_path {w}/cut.ckpt | cut.ckpt: the file is cut off
other-checkpoint | --ckpt_path {w}/state_dict.ckpt | Lightning did not write this checkpoint (it holds weight)
folder-checkpoint | --ckpt_path {w}/folder | a folder without meta.pt is no checkpoint
"""
CASES = [tuple(part.strip() for part in line.split("|")) for line in OPTIONS.strip().splitlines()]

# The same with options that are not split into words.
LINES = {
    "callback-class": (CALLBACK.format("WarmupCosin", ""), "no class 'WarmupCosin'; did you mean 'WarmupCosine'?"),
    "callback-option": (CALLBACK.format("WarmupCosine", '"flor": 1'), "WarmupCosine has no option 'flor'"),
    "callback-needs": (CALLBACK.format("EarlyStopping", ""), "EarlyStopping needs monitor"),
    "callback-refuses": (CALLBACK.format("EarlyStopping", '"monitor": "x", "mode": "up"'), "`mode` can be"),
    "reward-option": (REWARD.format("FormatMatch", '"patern": "x"'), "no option 'patern'; did you mean 'pattern'?"),
    "reward-refuses": (REWARD.format("FormatMatch", '"pattern": "("'), "'(' is not a regular expression"),
    "mid-iteration": (
        CALLBACK.format("ModelCheckpoint", '"every_n_train_steps": 3, "monitor": "step"') + " --data.passes=2",
        "ModelCheckpoint(every_n_train_steps=3) would save in the middle of an iteration",
    ),
    "allowed-placement": (CALLBACK.format("ResumeGuard", '"allow": ["kl_placement"]'), "cannot be allowed to change"),
}

RECIPES = {
    "yaml": ("model: [a\ntrainer: {", "line 2: expected ',' or ']'"),
    "tab": ("model:\n\tlr: 3", "line 2: found character"),
    "list": ("- a\n- b\n", "but it is a list"),
    "empty": ("", "but it is empty"),
    "twice": ("model: {}\ndata: {}\nmodel: {}\n", "line 3: the key 'model' stands twice"),
    "key": ("modell: {}\n", "there is no option 'modell'; did you mean 'model'?"),
    "half": ("trainer: {max_epochs: 1}\n", "lit-rlhf fit needs data: and model:"),
    "no-class": (
        "model: {lr: 3}\ndata: {class_path: RolloutDataModule}\n",
        "LightningModule has no option 'lr'; its options are none",
    ),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory, policy_dir, write_recipe):
    folder = tmp_path_factory.mktemp("world")
    bad = folder / "bad"
    (bad / "folder").mkdir(parents=True)
    row, answer = '{"prompt": "1+1=", "answer": "2"}\n', '{"prompt": "1+1="}\n'
    chat = json.dumps({"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"})
    files = {
        "prompts.docx": row,
        "empty.jsonl": "",
        "broken.jsonl": row + '{"prompt": oops}\n',
        "null.jsonl": row + '{"prompt": null, "answer": "2"}\n',
        "no_answers.jsonl": answer,
        "chat.jsonl": chat + "\n",
        "a_file": "words",
        "empty.ckpt": "",
    }
    for name, text in files.items():
        (bad / name).write_text(text)
    torch.save({"weight": torch.zeros(3000)}, bad / "state_dict.ckpt")
    (bad / "cut.ckpt").write_bytes((bad / "state_dict.ckpt").read_bytes()[:5000])
    for name in ("no_tokenizer", "broken_config", "cut_weights"):
        shutil.copytree(policy_dir, bad / name)
    for file in (bad / "no_tokenizer").glob("tokenizer*"):
        file.unlink()
    (bad / "broken_config" / "config.json").write_text("{")
    weights = bad / "cut_weights" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    return SimpleNamespace(recipe=write_recipe(folder), bad=bad, policy=policy_dir, kept=folder / "kept")


@pytest.fixture(autouse=True)
def _no_other_arguments(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lit-rlhf"])
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)


def message(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """The one message in which a command line ends."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    assert stop.value.code in (1, 2)
    said = capsys.readouterr().err
    assert "Traceback" not in said
    lines = [line for line in said.splitlines() if line.startswith("lit-rlhf: error: ")]
    assert len(lines) == 1
    assert said.rstrip().endswith(lines[0]), "something stands below the message, or it has several lines"
    return lines[0]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("options", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_an_option_that_cannot_be(world, capsys, options, expected):
    words = [word.format(w=world.bad, p=world.policy) for word in options.split()]
    said = message(capsys, "fit", "-c", world.recipe, *words)
    assert expected.format(w=world.bad) in said
    assert not world.kept.exists() or not list(world.kept.iterdir()), "it trained"


@pytest.mark.parametrize(("option", "expected"), LINES.values(), ids=LINES)
def test_a_class_that_cannot_be(world, capsys, option, expected):
    start, plus, rest = option.rpartition(" --data")
    words = [start, plus.strip() + rest] if plus else [option]
    assert expected in message(capsys, "fit", "-c", world.recipe, *words)


@pytest.mark.parametrize(("text", "expected"), RECIPES.values(), ids=RECIPES)
def test_a_recipe_that_cannot_be(tmp_path, capsys, text, expected):
    recipe = tmp_path / "bad.yaml"
    recipe.write_text(text)
    said = message(capsys, "fit", "-c", recipe)
    assert expected in said
    assert str(recipe) in said or "class_path:" in said or "needs" in said


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "give a command; the commands are fit, validate, test, predict, "),
        (["fitt"], "there is no command 'fitt'"),
        (["fit"], "lit-rlhf fit needs data: and model:"),
        (["fit", "-c"], "-c needs a recipe"),
        (["fit", "-c", "nowhere.yaml"], "-c nowhere.yaml: No such file or directory"),
        (["fit", "--config=nowhere.yaml"], "--config nowhere.yaml: No such file or directory"),
        (["data", "check", "-c", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_a_command_that_cannot_be(capsys, words, expected):
    assert expected in message(capsys, *words)


@pytest.mark.timeout(120)
def test_the_process_ends_in_one_line_too(world):
    """The real command: nothing that only this test's process has hides a traceback."""
    command = [sys.executable, "-m", "lit_rlhf", "fit", "-c", str(world.recipe), "--model.klcoef", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr == "lit-rlhf: error: model: GRPOModule has no option 'klcoef'; did you mean 'kl_coef'?\n"
    asked = subprocess.run([*command, "--traceback"], capture_output=True, text=True, check=False)
    assert asked.returncode == 1
    assert "Traceback (most recent call last)" in asked.stderr
    assert "UsageError" in asked.stderr


def test_the_models_own_sampling_options_are_not_followed_and_that_is_said(world, tmp_path, capsys, caplog):
    shutil.copytree(world.policy, tmp_path / "policy")
    (tmp_path / "policy" / "generation_config.json").write_text('{"temperature": 0.2, "top_k": 3, "do_sample": true}')
    words = ["--model.policy", tmp_path / "policy", "--trainer.max_epochs", 0, "--trainer.callbacks", "null"]
    main([str(word) for word in ("fit", "-c", world.recipe, *words, "--trainer.default_root_dir", tmp_path)])
    said = [record.getMessage() for record in caplog.records if "generation_config" in record.getMessage()]
    assert len(said) == 1
    assert "{'temperature': 0.2, 'top_k': 3} is not followed" in said[0]
