# `make reproduce` and `make test` need nothing but Python and this folder: they set up .venv themselves, once.
# Variables: PYTHON=python3.12 (which interpreter), ARGS="-k loader" (more arguments for pytest), JOBS=4 (trainings at once),
# MINUTES=9 (for one call of measure-gpu).

VENV := .venv
# the state of .venv: "installing" while it is being filled, then a checksum of the files that say what belongs in it
STATE := $(VENV)/.installed
PYTHON :=
# a machine with a GPU may have PyTorch and no network: without a .venv its own Python runs what is for GPUs
SYSTEM_PYTHON := $(if $(wildcard $(VENV)),,$(if $(filter test-gpu measure-gpu,$(MAKECMDGOALS)),$(shell \
	$(or $(PYTHON),python3) -c 'import torch' 2>/dev/null && echo $(or $(PYTHON),python3))))
GPU_PYTHON := $(or $(SYSTEM_PYTHON),$(VENV)/bin/python)
ARGS :=
JOBS := 2
MINUTES :=
# PyTorch with its CUDA libraries takes 6 GB; the downloaded wheels lie beside it until they are installed
NEED_GB := 10

.PHONY: help setup lint test test-all test-browser test-gpu reproduce measure-cpu measure-gpu

help:
	@echo 'make reproduce      run the whole pipeline, and compare its scores with the committed ones; then open results/tables.md'
	@echo 'make test           run the tests, in minutes; ARGS="-k loader" selects some of them'
	@echo 'make test-all       run them at every size, dtype and architecture too; a third of an hour or more'
	@echo 'make measure-cpu    run what takes hours, the digits profile: seeds, ablations, readings, speed; JOBS=2 trains two at once'
	@echo 'make measure-gpu    measure a CUDA GPU: kernels, training, every family over the image size; MINUTES=9 stops in time'
	@echo 'make lint           check the style and the format of the Python code'
	@echo 'make test-browser   test results/report.html in a real browser, with screenshots in .runs/browser'
	@echo 'make test-gpu       check the kernels and train every nano model on the CUDA GPUs; without one, all is skipped'
	@echo 'make setup          only create .venv and install what requirements.lock says; PYTHON=... chooses the interpreter'

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

# a process per core, each with one thread: there are many small tests, and those of a file share what it prepares
PYTEST := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(VENV)/bin/python -m pytest --numprocesses auto --maxprocesses 4 \
	--dist loadfile --no-loadscope-reorder

test: setup
	$(PYTEST) $(ARGS)

test-all: setup
	$(PYTEST) -m 'not browser and not gpu' $(ARGS)

# An installed Chromium is used; without one, playwright downloads it
test-browser: setup
	@$(VENV)/bin/python -c 'import playwright' 2>/dev/null || $(VENV)/bin/python -m pip install --disable-pip-version-check playwright==1.65.2
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || \
		$(VENV)/bin/python -m playwright install chromium || { echo 'make: there is no Chromium, and playwright could not download one; install it (Debian, Ubuntu: apt install chromium)' >&2; exit 1; }
	$(VENV)/bin/python -m pytest -m browser tests/browser $(ARGS)

test-gpu: $(if $(SYSTEM_PYTHON),,setup)
	$(GPU_PYTHON) -m pytest -m gpu -rs tests/gpu $(ARGS)

reproduce: setup
	@# DVC wants a Git repository unless told otherwise, and an unpacked archive is not one
	@[ -e .git ] || $(VENV)/bin/dvc config --local core.no_scm true
	$(VENV)/bin/repro run --force
	@# an archive holds no commit to compare with
	@[ ! -e .git ] || $(VENV)/bin/repro verify

REPRO := $(VENV)/bin/repro

# A second call continues; what is done stays when params.yaml is another profile again
measure-cpu: setup
	$(REPRO) profile use digits
	$(REPRO) run --jobs $(JOBS)
	@echo 'params.yaml is the digits profile; to return: $(REPRO) profile use mini'

# Into results/replications/<GPU>; a second call continues
measure-gpu: $(if $(SYSTEM_PYTHON),,setup)
	$(GPU_PYTHON) -m repro measure $(if $(MINUTES),--minutes $(MINUTES))
	$(GPU_PYTHON) -m repro report

# An installation that was cut short is thrown away: pip believes that a package is installed even if some of its files are missing.
# A .venv without our state file was made by somebody else: we install into it, and keep it if that fails.
setup:
	@set -e; \
	fail() { echo "make: $$1" >&2; exit 1; }; \
	recent() { "$$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }; \
	wanted=$$(cat requirements.lock pyproject.toml | cksum); \
	state=$$(cat $(STATE) 2>/dev/null || true); \
	if [ "$$state" = "$$wanted" ] && recent $(VENV)/bin/python; then exit 0; fi; \
	if [ "$$state" = installing ] || { [ -n "$$state" ] && ! recent $(VENV)/bin/python; }; then \
		echo "make: $(VENV) is unfinished or damaged and will be made again"; rm -rf $(VENV); \
	fi; \
	python=; \
	if [ ! -e $(VENV) ]; then \
		for candidate in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.14); do \
			if recent "$$candidate"; then python=$$candidate; break; fi; \
		done; \
		[ -n "$$python" ] || \
			fail "$(or $(PYTHON),python3) is not Python 3.11 or newer; install one, or name it: make PYTHON=/path/to/it"; \
		"$$python" -c 'import venv, ensurepip' 2>/dev/null || \
			fail "$$python has no venv module (Debian, Ubuntu: apt install python3-venv); install it, or name another: make PYTHON=..."; \
	fi; \
	free=$$(df -Pk . | awk 'NR == 2 { print int($$4 / 1048576) }'); \
	{ [ -n "$$state" ] && [ -z "$$python" ]; } || [ "$$free" -ge $(NEED_GB) ] || \
		fail "$$free GB are free here, but the installation needs $(NEED_GB) GB; make room (NEED_GB=... overrides)"; \
	mkdir -p $(VENV); \
	if [ ! -x $(VENV)/bin/python ]; then \
		[ -n "$$python" ] || fail "$(VENV) has no Python in it; remove it"; \
		echo installing > $(STATE); "$$python" -m venv $(VENV); \
	fi; \
	recent $(VENV)/bin/python || fail "$(VENV) has a Python older than 3.11; remove it"; \
	[ -z "$$state$$python" ] || echo installing > $(STATE); \
	echo "make: installing into $(VENV); this takes some minutes, once"; \
	{ $(VENV)/bin/python -m pip install --disable-pip-version-check --no-deps -r requirements.lock && \
		$(VENV)/bin/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation -e .; } || \
		fail "the installation failed, see above; run the same command again"; \
	echo "$$wanted" > $(STATE).new; mv $(STATE).new $(STATE)
