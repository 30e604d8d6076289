# Thin names over Python tools. `make` or `make help` lists them.
PYTHON ?= python3
TORCH ?= auto
BIN := .venv/bin
LIMIT := --timeout=900
PYTEST := $(BIN)/python -m pytest $(LIMIT)
CODE := $(wildcard release validate bench vllm)

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-all test-gpu lint compose lock verify image test-image

help:  ## list these
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 12

venv:  ## make .venv with the CPU fork, so that .venv/bin/vllm serve works (TORCH=cpu|cuda|auto)
	@$(PYTHON) -m release venv --torch $(TORCH)

demo: venv  ## serve a small generated checkpoint, or MODEL=dir, on PORT (8000); DEMO_ONCE=1 stops after the answer
	@$(BIN)/python -m validate.demo

test: venv  ## every test that is fast enough
	@$(BIN)/python -m tests $(LIMIT) -m "not slow and not gpu"

test-all: venv  ## also the slow ones
	@$(BIN)/python -m tests $(LIMIT) -m "not gpu"

test-gpu:  ## the kernel tests, on a GPU machine: needs only torch and pytest, no package index
	@$(PYTHON) -m pytest tests/gpu

lint: venv  ## ruff, mypy, the patches and the laws of the repository
	@$(BIN)/python -m ruff check $(CODE) tests
	@$(BIN)/python -m mypy $(CODE)
	@$(PYTEST) -q tests/test_laws.py

compose:  ## write both wheels of the fork to dist
	@$(PYTHON) -m release compose --target cpu
	@$(PYTHON) -m release compose --target cuda

lock:  ## bring release/manifest.lock up to date (RESOLVE=1: the dependencies too, over the network)
	@$(PYTHON) -m release lock $(if $(RESOLVE),--resolve)

verify:  ## check the lock, the checkout and the wheels in dist against each other
	@$(PYTHON) -m release verify

image:  ## build the image with Docker: TARGET=cuda or cpu; EXLLAMAV3=1: with exllamav3's kernels, hours more
	@$(PYTHON) -m release build --target $(or $(TARGET),cuda) $(if $(filter 1,$(EXLLAMAV3)),--exllamav3)

test-image: venv  ## build the CPU image with a real engine of its own and use it; root on Debian only
	@$(BIN)/python tests/docker/run.py
