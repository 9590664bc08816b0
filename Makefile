# Each target sets up what it needs. `make demo` and `make test` are all that a fresh machine has to run.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
SOURCES := pyproject.toml constraints.txt

SEED ?= 2026

DEMO := build/demo
DEMO_PROJECT := httpx==0.28.1
DEMO_FILE := httpx/_client.py
DEMO_LINE := 1821

.PHONY: demo serve test gpu-test soak lint format plan bench results clean

demo: $(VENV)/run.stamp $(DEMO)/project
	$(BIN)/megaspan complete --repo $(DEMO)/project --file $(DEMO_FILE) --line $(DEMO_LINE) \
		--context 32768 --max-tokens 128

serve: $(VENV)/run.stamp
	$(BIN)/megaspan serve models/span-code

test: lint
	$(BIN)/python -m pytest

# On a GPU machine as it is: only torch, Triton, transformers and what the tests themselves are made of.
gpu-test:
	@$(PYTHON) -c "import torch, sys; torch.cuda.is_available() or sys.exit('gpu-test: PyTorch sees no CUDA device here')"
	PYTHONPATH=src:. $(PYTHON) -m pytest -m gpu -o addopts="-q --strict-markers --import-mode=importlib" \
		$$(grep --recursive --files-with-matches --include='test_*.py' 'mark\.gpu' tests)

soak: $(VENV)/dev.stamp
	$(BIN)/python -m tests.engine.soak --requests 2000 --seed $(SEED)

lint: $(VENV)/dev.stamp
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/pyright

format: $(VENV)/dev.stamp
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

plan: $(VENV)/run.stamp
	$(BIN)/megaspan plan --config glm-5.2 --context 1048576

bench: $(VENV)/bench.stamp
	$(BIN)/megaspan bench cpu --record

results: $(VENV)/dev.stamp
	$(BIN)/megaspan bench results

# What the demo completes: a project that the model has not been trained on, from the package index.
$(DEMO)/project: | $(VENV)/run.stamp
	mkdir -p $(DEMO)
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
		--dest $(DEMO) $(DEMO_PROJECT)
	$(BIN)/python -m zipfile -e $(DEMO)/*.whl $(DEMO)/unpacked
	mv $(DEMO)/unpacked $@

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch first and alone, at the tested version. Which build that is (CPU or CUDA) is up to pip's own settings:
# see README for taking the CPU build where the default index serves CUDA.
$(VENV)/run.stamp: $(SOURCES) | $(VENV)/bin/python
	$(PIP) torch==$$(sed -n 's/^torch==//p' constraints.txt)
	$(PIP) --editable .
	touch $@

$(VENV)/dev.stamp: $(VENV)/run.stamp
	$(PIP) --editable '.[dev,train]'
	touch $@

$(VENV)/bench.stamp: $(VENV)/dev.stamp
	$(PIP) --editable '.[bench]'
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
