# make demo | make test do everything from a fresh clone with only python3 there.
# PYTHON=/path/to/python chooses another interpreter, with an environment of its own.

PYTHON ?= python3
PYVER  := $(shell $(PYTHON) -c 'import sys; print("%d%d" % sys.version_info[:2])' 2>/dev/null)
VENV   ?= $(if $(filter python3,$(PYTHON)),.venv,.venv-py$(PYVER))
PIN    := constraints/py$(if $(filter 311,$(PYVER)),311,313).txt
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
AOT    := $(VENV)/aot
DEMO   := runs/demo

.PHONY: demo test test-full soak setup aot lint format docs pin clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       train a small text-to-image model on 8 virtual devices, then look at its pictures"
	@echo "make test       the tests, without the slow ones"
	@echo "make test-full  all tests"
	@echo "make soak       trainings killed (SIGKILL) at random, 20 times in a row, lose nothing"
	@echo "make lint       ruff, pyright, import-linter"
	@echo "make docs       build the documentation into site/"
	@echo "make aot        install compilers for TPUs and GPUs into $(AOT): the tests then compile for hardware that is not here"
	@echo "make setup      create $(VENV) and install into it (done by the others on their own)"

setup: $(STAMP)

$(STAMP): pyproject.toml $(PIN) Makefile
	@test -n "$(PYVER)" || { echo "error: '$(PYTHON)' does not run: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11"; exit 2; }
	@test "$(PYVER)" -ge 311 || { echo "error: $(PYTHON) is Python $(PYVER), 3.11 or newer is needed: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11"; exit 2; }
	@echo "setup: environment $(VENV) with $(PYTHON) (Python $(PYVER)), versions from $(PIN)"
	@test "$$($(BIN)/python -c 'import sys; print("%d%d" % sys.version_info[:2])' 2>/dev/null)" = "$(PYVER)" || { rm -rf $(VENV) && $(PYTHON) -m venv $(VENV); }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(PIN) -e '.[dev,docs]'
	@touch $(STAMP)
	@echo "setup: done"

# In a folder of their own, which only the tests that compile ahead of time read: in the environment itself, jax would
# look for the hardware at every start. --no-deps: no CUDA libraries.
aot: $(AOT)/.installed

$(AOT)/.installed: $(STAMP)
	@echo "aot: compilers for TPUs and GPUs, into $(AOT)"
	@rm -rf $(AOT)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(PIN) --no-deps --target $(AOT) \
	  $$($(BIN)/python -c 'import tomllib; print(*(r.split(";")[0] for r in tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["aot"]))')
	@touch $@

demo: setup
	@rm -rf $(DEMO)
	@echo "demo: train the recipe pictures-demo on 8 virtual devices, mesh data=4,tensor=2"
	@$(BIN)/maxdiffusion train pictures-demo run=$(DEMO) --virtual-devices 8
	@echo "demo: what it learned"
	@$(BIN)/maxdiffusion evaluate $(DEMO) --virtual-devices 8
	@echo "demo: now paint something: $(BIN)/maxdiffusion generate \"a red apple, flat style\" --from $(DEMO) -n 4"

test: setup
	@echo "test: all but the slow ones, on 8 virtual devices; in two processes, one for whole runs and one for parts of models"
	@$(BIN)/python -m pytest -n 2 --dist loadscope -m "not slow" $(ARGS)

test-full: setup
	@$(BIN)/python -m pytest -n 2 --dist loadscope $(ARGS)

soak: setup
	@echo "soak: trainings killed at random moments, 20 times in a row, must end with the bits of unbroken ones"
	@$(BIN)/python -m tests.train.soak $(ARGS)

lint: setup
	@echo "lint: ruff, pyright, import-linter"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright --pythonpath $(BIN)/python
	@$(BIN)/lint-imports

format: setup
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: setup
	@$(BIN)/mkdocs build --strict

# Newest versions that the ranges in pyproject.toml allow, written down as name==version lines.
pin:
	@rm -rf build/pin && $(PYTHON) -m venv build/pin
	@build/pin/bin/python -m pip install --quiet --disable-pip-version-check -e '.[dev,docs,aot]'
	@build/pin/bin/python -m pip freeze --exclude-editable | grep == > $(PIN)
	@echo "pin: wrote $(PIN)"

clean:
	rm -rf .venv .venv-py* build site .cache .pytest_cache .ruff_cache .import_linter_cache
