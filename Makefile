# `make reproduce` and `make test` need nothing but Python and this folder: they set up .venv themselves, once.
# Variables: PYTHON=python3.12 (which interpreter), ARGS="-k loader" (more arguments for pytest), JOBS=4 (trainings at once),
# MINUTES=9 (for one call of measure-gpu).

VENV := .venv
# the state of .venv: "installing" while it is being filled, then a checksum of the files that say what belongs in it
STATE := $(VENV)/.installed
PYTHON :=
ARGS :=
JOBS := 2
MINUTES :=
# PyTorch with its CUDA libraries takes 6 GB; the downloaded wheels lie beside it until they are installed
NEED_GB := 10

.PHONY: help setup lint test test-all test-browser test-gpu reproduce measure-cpu measure-gpu

help:
	@echo 'make reproduce      run the whole pipeline; then open results/tables.md'
	@echo 'make test           run the tests, in minutes; ARGS="-k loader" selects some of them'
	@echo 'make test-all       run them at every size, dtype and architecture too; a third of an hour or more'
	@echo 'make measure-cpu    run by hand what takes hours: seeds, ablations, readings, speed, kernels; JOBS=2 trains two at once'
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

test-gpu: setup
	$(VENV)/bin/python -m pytest -m gpu -rs tests/gpu $(ARGS)

reproduce: setup
	@# DVC wants a Git repository unless told otherwise, and an unpacked archive is not one
	@[ -e .git ] || $(VENV)/bin/dvc config --local core.no_scm true
	$(VENV)/bin/repro run --force

# Everything under results/measured/<this CPU> and results/measured/compile, in order. Each step keeps what is finished, so a second call
# continues. The rates that `repro tune` chooses go into params.yaml by hand, before the rest; what needs a quiet machine comes last.
REPRO := $(VENV)/bin/repro
measure-cpu: setup
	$(REPRO) prepare-data
	$(REPRO) tune --data digits --jobs $(JOBS)
	printf '%s\n' 'pretrain --cell vittt_nano_digits' 'baselines --cell resnet_nano_digits' 'baselines --cell deit_nano_digits' \
		'baselines --cell vim_nano_digits' 'baselines --cell vrwkv_nano_digits' 'baselines --cell vit3_nano_digits' \
		| OMP_NUM_THREADS=1 xargs -P $(JOBS) -I CELL sh -c '$(REPRO) CELL --seeds 5'
	$(REPRO) ablate --all --data digits --seeds 7 --jobs $(JOBS) --no-speed
	printf '%s\n' conv1d dual conv2d \
		| OMP_NUM_THREADS=1 xargs -P $(JOBS) -I VARIANT $(REPRO) ablate --variant VARIANT --data connect --seeds 7 --epochs 6 --no-speed
	$(REPRO) readings --train --data digits --seeds 3 --jobs $(JOBS)
	[ -f results/pretrain/vittt_nano_digits_wild/weights.safetensors ] || $(REPRO) pretrain --cell vittt_nano_digits_wild
	printf '%s\n' 'detect --cell vittt_nano_scenes' 'segment --cell vittt_nano_scenes' 'detect --cell vittt_nano_scenes --random' \
		'segment --cell vittt_nano_scenes --random' | OMP_NUM_THREADS=1 xargs -P $(JOBS) -I CELL sh -c '$(REPRO) CELL --seeds 3'
	printf '%s\n' 'baselines --cell hvit3_nano_digits' 'baselines --cell hvit3_nano_digits_mesa' 'baselines --cell vmamba_nano_digits' \
		'baselines --cell mambavision_nano_digits' 'detect --cell hvit3_nano_scenes' 'detect --cell vmamba_nano_scenes' \
		'segment --cell hvit3_nano_scenes' 'segment --cell vmamba_nano_scenes' \
		| OMP_NUM_THREADS=1 xargs -P $(JOBS) -I CELL sh -c '$(REPRO) CELL'
	$(REPRO) ablate --paper vit3 --all --data digits --seeds 5 --jobs $(JOBS) --no-speed
	[ -f results/baselines/t5_softmax_nano_digits/weights.safetensors ] || $(REPRO) baselines --cell t5_softmax_nano_digits
	$(REPRO) ablate --paper linearize --all --data digits --seeds 5 --jobs $(JOBS) --no-speed
	$(REPRO) baselines --cell t5_nano_digits_scratch --seeds 5
	$(REPRO) baselines --cell t5_softmax_deep_digits
	$(REPRO) ablate --paper linearize --all --data digits --seeds 2 --jobs $(JOBS) --no-speed \
		--teacher "$$(ls results/measured/*/baselines/t5_softmax_deep_digits/weights.safetensors | head -n 1)"
	for student in linear swiglu dwc_qk nat5; do \
		$(REPRO) explain --map attention --data digits --teacher results/baselines/t5_softmax_nano_digits/weights.safetensors \
			--weights "$$(ls results/measured/*/ablate/linearize/digits/$$student/weights.safetensors | head -n 1)" -o .runs/attention.png; done
	for data in digits connect; do \
		$(REPRO) ablate --paper kv_binding --all --data $$data --seeds 5 --jobs $(JOBS) --no-speed; done
	for variant in vit3_own lact_own vittt_own; do for probe in steps=2 steps=4 ascent q_is_k; do for data in digits connect; do \
		$(REPRO) explain --probe $$probe --data $$data \
			--weights "$$(ls results/measured/*/ablate/kv_binding/$$data/$$variant/weights.safetensors | head -n 1)"; done; done; done
	[ -f results/pretrain/vittt_nano_digits/weights.safetensors ] || $(REPRO) pretrain --cell vittt_nano_digits
	printf '%s\n' dit3_nano_digits dit_nano_digits dit_cpe_nano_digits \
		| OMP_NUM_THREADS=1 xargs -P $(JOBS) -I CELL $(REPRO) generate --cell CELL --seeds 3
	$(REPRO) ablate --all --data digits --seeds 7
	$(REPRO) forms
	$(REPRO) efficiency --res 224..1280 --minutes 60 --runs 2
	TRITON_INTERPRET=1 $(REPRO) kernels check
	$(REPRO) kernels resources

# Into results/measured/<GPU>; a second call continues. Without this .venv, on a machine that has PyTorch: `python -m repro measure`.
measure-gpu: setup
	$(REPRO) measure $(if $(MINUTES),--minutes $(MINUTES))
	$(REPRO) report

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
