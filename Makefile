# A machine needs Linux, make, g++, openssl, libnuma1 (for a CPU) and Python 3.11 (or 3.12); each target installs the rest.
# Begin with `make train`.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

# On a machine with a GPU: the CUDA builds of vLLM and torch. Otherwise: the CPU builds, from PIP_FIND_LINKS if it is set.
ifneq ($(shell command -v nvidia-smi),)
EXTRA := cuda
else
EXTRA := cpu
TORCH := $(if $(PIP_FIND_LINKS),--find-links "$(PIP_FIND_LINKS)",--torch-backend=cpu)
endif

# Tests run on two cores side by side, on small tensors: more threads a process only wait for each other.
test test-unit test-apart test-crash test-hosts soak fuzz: export OMP_NUM_THREADS := 1

# Bytecode is kept, whatever the shell sets: without it, every process compiles torch and vLLM again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help train test test-unit test-apart test-crash test-hosts lint docs up down bench-buffer bench-ledger bench-memory bench-plan bench-policies bench-report bench-requests bench-scale \
	bench-trainer bench-accuracy bench-peers bench-search gpu-check bench-stability bench-store bench-turns smoke compare-staleness studies compare-sync crash-matrix \
	soak fuzz image-base image image-check clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' Makefile

train: $(STAMP)  ## Post-train SmolLM2-135M-Instruct on two-digit addition; the same command resumes
	$(BIN)/tba train

test: $(STAMP)  ## Run the tests, including those with real servers and engines
	$(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder --durations 60 --timeout 600

test-unit: $(STAMP)  ## Run the tests without servers, engines, training, fuzzing and long waits
	$(BIN)/python -m pytest -n 2 --dist loadscope -m "not apart and not slow and not s3"

test-apart: $(STAMP)  ## Run the tests that take minutes each: printed commands, Prefect's page, kills, outages
	$(BIN)/python -m pytest -n 2 --dist loadscope --durations 25 -m apart

test-crash: $(STAMP)  ## Kill Trainer and S3 of a run, each once: the part of crash-matrix that CI runs
	$(BIN)/python -m pytest -m apart tests/faults/test_crash.py -k killed --timeout 900

test-hosts: $(STAMP)  ## Train on hosts that are namespaces, kill them, cut them off (ONLY=survives: the part that CI runs)
	$(BIN)/python -m pytest -m apart tests/hosts --timeout 1200 $(if $(ONLY),-k $(ONLY))

lint: $(STAMP)  ## Check style and common mistakes by ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

docs: $(STAMP)  ## Write docs/configuration.md, the table of settings
	$(BIN)/python -m docs.write_configuration

up: $(STAMP)  ## Start Prefect server, work pool, deployments and worker, until `make down`
	$(BIN)/tba up

down: $(STAMP)  ## Stop the processes that `make up` started
	$(BIN)/tba down

bench-buffer: $(STAMP)  ## Measure the replay buffer by size
	$(BIN)/python -m tests.benchmarks.bench_buffer

bench-ledger: $(STAMP)  ## Measure a question over the ledger of 100,000 steps on a remote S3
	$(BIN)/python -m tests.benchmarks.bench_ledger

bench-memory: $(STAMP)  ## Compare the memory that tba plan tells with the peaks of real runs' processes
	$(BIN)/python -m tests.benchmarks.bench_memory

bench-plan: $(STAMP)  ## Measure the error of tba plan on six real runs of a small model (PUBLISHED=1: only simulate the paper's)
	$(BIN)/python -m tests.benchmarks.bench_plan

bench-policies: $(STAMP)  ## Measure how fast a policy travels over 100 Mbit/s, as a delta and whole
	$(BIN)/python -m tests.benchmarks.bench_policies

bench-report: $(STAMP)  ## Measure report and diversity of large runs
	$(BIN)/python -m tests.benchmarks.bench_report

bench-trainer: $(STAMP)  ## Measure a training step beside TRL's (FLOAT32=1: in float32)
	$(BIN)/python -m tests.benchmarks.bench_trainer

bench-accuracy: $(STAMP)  ## Measure time to accuracy by seed (SEEDS=0,1,…) beside TRL
	$(BIN)/python -m tests.benchmarks.bench_accuracy

bench-peers: $(STAMP)  ## Measure TRL's GRPOTrainer beside this project's objectives on the testbed
	$(BIN)/python -m tests.benchmarks.bench_peers

gpu-check: $(STAMP)  ## Run and measure every part on an NVIDIA GPU
	$(BIN)/python -m tests.benchmarks.gpu_check

bench-requests: $(STAMP)  ## Count the requests of real runs to a remote S3 (SEARCHERS=1,3 chooses)
	$(BIN)/python -m tests.benchmarks.bench_requests

bench-scale: $(STAMP)  ## Measure a sync with 1 to 1,000 Searchers on a remote S3 (SEARCHERS=1,8,… chooses)
	$(BIN)/python -m tests.benchmarks.bench_scale

bench-search: $(STAMP)  ## Measure how well a Searcher fills its engine, beside bare vLLM
	$(BIN)/python -m tests.benchmarks.bench_search

bench-stability: $(STAMP)  ## Measure the default run by seed (SEEDS=0,1,…), alone and on a busy machine (LOAD=0,1)
	$(BIN)/python -m tests.benchmarks.bench_stability

bench-store: $(STAMP)  ## Compare the default run on a local S3 and in a folder, by seed (SEEDS=0,1,…)
	$(BIN)/python -m tests.benchmarks.bench_store

bench-turns: $(STAMP)  ## Compare asynchronous and synchronous training with a core each, by SEEDS and STEPS
	$(BIN)/python -m tests.benchmarks.bench_turns

smoke: $(STAMP)  ## Train every task for a few steps, with its own grader or judge
	$(BIN)/python -m tests.smoke.run

compare-staleness: $(STAMP)  ## Compare objectives by the age of samples: tapered and plain TB, Dr. GRPO, proximal RLOO
	$(BIN)/tba compare staleness --out docs/results

studies: $(STAMP)  ## Every study of flows/compare/studies, one after the other; if interrupted, it continues
	for study in flows/compare/studies/*.toml; do $(BIN)/tba compare $$(basename $$study .toml) --out docs/results || exit 1; done

compare-sync: $(STAMP)  ## Compare asynchronous and synchronous training
	$(BIN)/tba compare sync --out docs/results

crash-matrix: $(STAMP)  ## Kill every part of a run at every point of its checkpoint cycle, then test outages
	$(BIN)/python -m tests.faults.matrix
	$(BIN)/python -m pytest -m apart tests/faults

HOURS := 1
SEED := 1
STORE := radosgw

soak: $(STAMP)  ## Run under faults of store, network and machine: HOURS=1 SEED=1 STORE=radosgw (or moto)
	$(BIN)/python -m tests.faults.soak --hours $(HOURS) --seed $(SEED) --store $(STORE)

fuzz: $(STAMP)  ## Try ten thousand odd files, configurations and commands: only declared errors may occur
	$(BIN)/python -m pytest tests/faults/test_fuzzing_stores.py tests/faults/test_fuzzing_users.py --durations 10

# STORAGE_DRIVER=vfs: where overlay does not work. PIP_INDEX_URL, PIP_FIND_LINKS and PIP_CERT are passed on, if set.
VERSION = $(shell sed -n 's/^version = "\(.*\)"$$/\1/p' pyproject.toml)
BASE := debian:bookworm-slim
IMAGE = tba:$(VERSION)-$(EXTRA)
comma := ,
# Podman's own limits are above those of some machines, and crun refuses hybrid cgroups.
RUN_IMAGE = podman run --rm --runtime runc --network none --ulimit nofile=8192 --ulimit nproc=8192 \
	--volume $$store:/store:U --env TBA_STORE=file:///store $(IMAGE)
image-base image: export BUILDAH_ISOLATION ?= chroot

image-base:  ## Make the image BASE=localhost/bookworm of Debian's packages: as root, by debootstrap
	container=$$(buildah from scratch) && folder=$$(buildah mount $$container) \
		&& debootstrap --variant=minbase bookworm $$folder && rm -rf $$folder/var/cache/apt $$folder/var/lib/apt/lists/* \
		&& buildah umount $$container && buildah commit --rm $$container $(BASE)

image:  ## Build the container image by buildah: EXTRA=cpu or cuda, BASE=image of Debian bookworm
	buildah build --layers --file infra/container/Containerfile --tag $(IMAGE) --build-arg VERSION=$(VERSION) \
		--build-arg BASE=$(BASE) --build-arg EXTRA=$(EXTRA) $(if $(PIP_INDEX_URL),--build-arg INDEX=$(PIP_INDEX_URL)) \
		$(if $(PIP_FIND_LINKS),$(if $(wildcard $(PIP_FIND_LINKS)),--build-arg WHEELS=/wheels \
		--volume $(abspath $(PIP_FIND_LINKS)):/wheels:ro,--build-arg WHEELS=$(PIP_FIND_LINKS))) \
		$(if $(PIP_CERT),--secret id=certificates$(comma)src=$(PIP_CERT)) .

image-check:  ## Train the embedded model for five steps in the image, without a network; verify
	store=$$(mktemp -d) && trap "rm -rf $$store 2>/dev/null || podman unshare rm -rf $$store" EXIT \
		&& $(RUN_IMAGE) tba train check --steps 5 && $(RUN_IMAGE) tba verify check

clean:  ## Remove the environment and caches; runs in .tba/ stay
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.tba/*' -prune -exec rm -rf {} +

# The stamp comes last, so an interrupted install is continued. Bytecode is compiled here, on all cores, and not by the first
# processes that import torch and vLLM. The embedded model is converted here, once.
$(STAMP): pyproject.toml infra/constraints.txt infra/overrides.txt
	@$(PYTHON) -c 'import sys; assert (3, 11) <= sys.version_info < (3, 13), f"Python 3.11 or 3.12 is needed, this is {sys.version}; name one: make PYTHON=python3.11 ... (uv python install 3.12 brings one)"'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c infra/constraints.txt uv
	$(BIN)/uv pip install --compile-bytecode --python $(BIN)/python --overrides infra/overrides.txt -c infra/constraints.txt $(TORCH) -e ".[$(EXTRA),dev]"
	$(BIN)/python -m tba.models
	touch $@
