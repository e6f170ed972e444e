# `make` or `make help` lists the targets. Every target makes .venv where it is missing.
.DEFAULT_GOAL := help
.PHONY: help venv format lint type test test-dist test-parity test-matrix bench tables check

BIN := .venv/bin
PYTEST := OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu $(BIN)/python -m pytest

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

venv: ## make .venv and install what development needs
	launch/setup_venv.sh --dev

format: venv ## rewrite the code in the house style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: venv ## check style and spelling
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell

type: venv ## check types
	$(BIN)/mypy

test: venv ## unit tests
	$(PYTEST) tests/unit

test-dist: venv ## tests on real ranks
	$(PYTEST) tests/distributed

test-parity: venv ## comparisons with transformers
	$(PYTEST) tests/parity

test-matrix: venv ## every layout against one process (20 minutes; goes on where it stopped)
	OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu $(BIN)/python -m tests.support.layout_matrix \
		--output benchmarks/results/cpu/layout_matrix.json

bench: venv ## CPU benchmarks (well over half an hour on two idle cores)
	$(BIN)/python -m benchmarks.step.compare huggingface --output benchmarks/results/cpu/step.json
	$(BIN)/python -m benchmarks.step.compare peers --output benchmarks/results/cpu/peers.json
	$(BIN)/python -m benchmarks.step.compare disentanglement --output benchmarks/results/cpu/disentanglement.json
	$(BIN)/python -m benchmarks.step.compare profile --output benchmarks/results/cpu/profile.json
	$(BIN)/python -m benchmarks.attention.operator --output benchmarks/results/cpu/attention.json

tables: venv ## write the tables of README and docs from the committed results
	$(BIN)/python -m benchmarks.tables --write

check: ## everything that must pass before a merge
	tests/run.sh
