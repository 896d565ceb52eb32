# Everything sets itself up: a machine needs only Python 3.11 (or 3.12) and make. `make train` is the place to start.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

# A GPU chooses the CUDA build of vLLM and torch; else the CPU builds, from a local folder of wheels where one is named.
ifneq ($(shell command -v nvidia-smi),)
EXTRA := cuda
else
EXTRA := cpu
TORCH := $(if $(PIP_FIND_LINKS),--find-links "$(PIP_FIND_LINKS)",--torch-backend=cpu)
endif

# Tests run on two cores side by side, on small tensors: more threads a process only wait for each other.
test test-unit test-apart test-crash soak fuzz: export OMP_NUM_THREADS := 1

# Bytecode is kept, whatever the shell says: without it, every process that imports torch or vLLM compiles them anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help train test test-unit test-apart test-crash lint docs up down bench-buffer bench-report bench-trainer bench-accuracy \
	bench-stability smoke compare-staleness studies compare-sync crash-matrix soak fuzz clean

help:  ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' Makefile

train: $(STAMP)  ## Post-train SmolLM2-135M-Instruct on two-digit addition; the same command resumes
	$(BIN)/tba train

test: $(STAMP)  ## The tests, real servers and engines included
	$(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder --durations 25

test-unit: $(STAMP)  ## The tests that start no server, engine or process: under two minutes
	$(BIN)/python -m pytest -n 2 --dist loadscope -m "not apart and not slow and not s3"

test-apart: $(STAMP)  ## Tests of minutes each: printed commands, Prefect's page, two Trainer processes, kills, outages
	$(BIN)/python -m pytest -n 2 --dist loadscope --durations 25 -m apart

test-crash: $(STAMP)  ## Searcher, Trainer and S3 of a run are killed, each once: the part of crash-matrix that CI runs
	$(BIN)/python -m pytest -m apart tests/faults -k killed

lint: $(STAMP)  ## Style and the usual mistakes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

docs: $(STAMP)  ## What is generated of docs/: the reference of settings
	$(BIN)/python -m docs.write_configuration

up: $(STAMP)  ## Prefect server, work pool, deployments, worker, until `make down`
	$(BIN)/tba up

down: $(STAMP)  ## Stops what `make up` started
	$(BIN)/tba down

bench-buffer: $(STAMP)  ## How the replay buffer scales
	$(BIN)/python -m tests.benchmarks.bench_buffer

bench-report: $(STAMP)  ## The report and the diversity of large runs
	$(BIN)/python -m tests.benchmarks.bench_report

bench-trainer: $(STAMP)  ## A training step beside TRL's, which it installs
	$(BIN)/uv pip install --quiet --python $(BIN)/python --overrides infra/overrides.txt -c infra/constraints.txt $(TORCH) -e ".[$(EXTRA),dev,bench]"
	$(BIN)/python -m tests.benchmarks.bench_trainer

bench-accuracy: $(STAMP)  ## Time to accuracy by seed (SEEDS=0,1,…) beside TRL, which it installs
	$(BIN)/uv pip install --quiet --python $(BIN)/python --overrides infra/overrides.txt -c infra/constraints.txt $(TORCH) -e ".[$(EXTRA),dev,bench]"
	$(BIN)/python -m tests.benchmarks.bench_accuracy

bench-stability: $(STAMP)  ## The default run by seed (SEEDS=0,1,…), alone and on a busy machine (LOAD=0,1)
	$(BIN)/python -m tests.benchmarks.bench_stability

smoke: $(STAMP)  ## Every task through tba/train, a few steps each, with its own grader or judge
	$(BIN)/python -m tests.smoke.run

compare-staleness: $(STAMP)  ## Accuracy by the age of the samples: Trajectory Balance, tapered and plain, Dr. GRPO, proximal RLOO
	$(BIN)/tba compare staleness

studies: $(STAMP)  ## Every study of flows/compare/studies, one after the other; some 80 minutes, and interrupted it continues
	for study in flows/compare/studies/*.toml; do $(BIN)/tba compare $$(basename $$study .toml) || exit 1; done

compare-sync: $(STAMP)  ## Asynchronous beside synchronous training, on the same hardware
	$(BIN)/tba compare sync

crash-matrix: $(STAMP)  ## Kill every part of a run at every point of its checkpoint cycle, then outages; nothing may be lost
	$(BIN)/python -m tests.faults.matrix
	$(BIN)/python -m pytest -m apart tests/faults

HOURS := 1
SEED := 1
STORE := radosgw

soak: $(STAMP)  ## A run under faults of store, network, machine: HOURS=1 SEED=1 STORE=radosgw (or moto)
	$(BIN)/python -m tests.faults.soak --hours $(HOURS) --seed $(SEED) --store $(STORE)

fuzz: $(STAMP)  ## Ten thousand odd files, configurations, commands: only declared errors, no traceback
	$(BIN)/python -m pytest tests/faults/test_fuzzing_stores.py tests/faults/test_fuzzing_users.py --durations 10

clean:  ## Remove the environment and caches; runs in .tba/ stay
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.tba/*' -prune -exec rm -rf {} +

# The stamp comes last, so an interrupted install is taken up again. Bytecode is compiled here, on all cores, and not by
# the first processes that import torch and vLLM one after the other; the embedded model is unpacked here, once.
$(STAMP): pyproject.toml infra/constraints.txt infra/overrides.txt
	@$(PYTHON) -c 'import sys; assert (3, 11) <= sys.version_info < (3, 13), f"Python 3.11 or 3.12 is needed, this is {sys.version}; name one: make PYTHON=python3.11 ..."'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c infra/constraints.txt uv
	$(BIN)/uv pip install --compile-bytecode --python $(BIN)/python --overrides infra/overrides.txt -c infra/constraints.txt $(TORCH) -e ".[$(EXTRA),dev]"
	$(BIN)/python -m tba.models
	touch $@
