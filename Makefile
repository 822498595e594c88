# make train   trains the tiny preset on this machine's CPU; extra overrides: make train ARGS="run.steps=20"
# make test    runs the whole suite;                          a part of it:   make test ARGS="tests/unit -k launch"
# make lint / make format

PYTHON ?= python3
PIP_ARGS ?=
ARGS ?=
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check install -q -c constraints.txt $(PIP_ARGS)
BUILD_INPUTS := pyproject.toml constraints.txt setup.py $(wildcard csrc/*.cpp csrc/*.cu csrc/include/*)
TEST_LIMIT_S ?= 2400

export OMP_NUM_THREADS = 1

.PHONY: train test lint format clean

train: $(VENV)/.stamp-run
	$(VENV)/bin/megalite launch configs/gpt_tiny_cpu.yaml $(ARGS)

test: $(VENV)/.stamp-test
	timeout --signal=INT --kill-after=30 $(TEST_LIMIT_S) $(VENV)/bin/python -m pytest $(ARGS)

lint: $(VENV)/.stamp-test
	$(VENV)/bin/ruff check .

format: $(VENV)/.stamp-test
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf build *.egg-info megalite/_C*.so megalite/_build_info.json $(VENV)/.stamp-*

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# The stamps are written last, so an interrupted install is simply done again.
$(VENV)/.stamp-run: $(BUILD_INPUTS) | $(VENV)/bin/python
	$(PIP) -e .
	touch $@

$(VENV)/.stamp-test: $(BUILD_INPUTS) | $(VENV)/bin/python
	$(PIP) -e ".[test]"
	touch $@ $(VENV)/.stamp-run
