# make run    sets everything up and does the main job: trains, evaluates, reports (CPU: 10 minutes)
# make test   sets everything up and runs the fast tests of everything
# make docs   sets everything up and builds the documentation in site/
PYTHON ?= python3
VENV ?= .venv
PEERS ?= .venv-peers
AOT ?= .venv-aot
DOCS ?= .venv-docs
INSTALLED ?= .venv-wheel
PIP_FLAGS = --quiet --disable-pip-version-check --constraint constraints.txt
# Files of exactly these hashes, and nothing that another of them asks for.
LOCKED = --quiet --disable-pip-version-check --no-deps --require-hashes --no-build-isolation
THIS = --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
LOCK = uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header \
  --no-annotate --constraint constraints.txt
FAST = not slow and not peers and not programs

.PHONY: run test test-programs test-peers test-slow test-data test-wheel fuzz kills faults aot \
  aot-steps docs lint types wheel lock clean

run: $(VENV)/.run
	$(VENV)/bin/python -m train.main --config configs/nmt_cah.py --workdir runs/nmt_cah

test: $(VENV)/.test lint types
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal -m "$(FAST)"

# Runs, kills and continues programs as users start them: several hosts, TPU scripts, signals.
# Only files that have such tests are imported.
test-programs: $(VENV)/.test
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal -m "programs and not slow" \
	  $$(grep --recursive --files-with-matches --include='*.py' 'mark\.programs' tests)

# Compares with PyTorch and Hugging Face; their wheels are large, so they get a place of their own,
# without hashes: which file of PyTorch is right differs between machines.
test-peers: $(PEERS)/.peers
	$(PEERS)/bin/python -m pytest -n 2 --dist worksteal -m peers tests/peers

# Minutes to an hour: repeated kills, statistics over many draws.
test-slow: $(VENV)/.test
	$(VENV)/bin/python -m pytest -m slow

# Reads the real texts and sets in COMPMOD_DATA; make test does so too where it is set.
test-data: $(VENV)/.test
	$(VENV)/bin/python -m pytest -m real_data

# Works with the installed wheel, far from here.
test-wheel: $(VENV)/.test $(INSTALLED)/.train
	COMPMOD_INSTALLED=$(INSTALLED) $(VENV)/bin/python -m pytest -n 2 --dist worksteal -m slow \
	  tests/test_wheel.py

# Damaged files and hostile lines for all readers and predict; make fuzz FUZZ_SECONDS=60 FUZZ_SEED=1
FUZZ_SECONDS ?= 600
FUZZ_SEED ?= 0
fuzz: $(VENV)/.test
	$(VENV)/bin/python -m benchmarks.fuzz --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED) \
	  --json results/robustness/fuzz.json

# Kills four kinds of run at random moments and continues them; make kills KILLS=5 for fewer of each
KILLS ?= 50
kills: $(VENV)/.test
	$(VENV)/bin/python -m benchmarks.kills --kills $(KILLS) --json results/robustness/kills.json

# Lets the disk be full or fail under every writer; needs a C compiler.
faults: $(VENV)/.test
	$(VENV)/bin/python -m benchmarks.faults --json results/robustness/faults.json

# Compiles the kernels for TPUs and an H100, none of which has to be here.
aot: $(AOT)/.aot
	$(AOT)/bin/python -m benchmarks.aot

# Compiles whole training steps for TPUs that are not here.
aot-steps: $(AOT)/.aot
	$(AOT)/bin/python -m pytest -m slow tests/tools/test_aot.py
	for slice in v5e:2x2 v5p:2x2x1 v6e:2x2 v5e:4x4; do \
	  $(AOT)/bin/python -m train.main --config configs/nmt_cah.py:grammar --aot $$slice || exit 1; \
	done

# Runs the code of the main pages; warnings are errors, and so is anything from a network.
docs: $(DOCS)/.docs
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict
	@echo "open site/index.html in a browser"

lint: $(VENV)/.test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.test
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

# From a clean folder, as what an earlier build left there would get into it.
wheel: $(VENV)/.run
	rm -rf build dist *.egg-info
	$(VENV)/bin/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

# Installs the wheel as users do, in an environment of its own.
$(INSTALLED)/.train: $(shell find compmod_jax -type f -not -name '*.pyc') \
    $(wildcard configs/*.py) pyproject.toml setup.py constraints.txt README.md
	$(MAKE) wheel
	rm -rf $(INSTALLED)
	$(PYTHON) -m venv $(INSTALLED)
	set -- dist/*.whl && $(INSTALLED)/bin/pip install $(PIP_FLAGS) "$$1[train]"
	@touch $@

# Writes requirements/ again, after constraints.txt or pyproject.toml has changed; needs uv.
lock:
	echo 'setuptools>=77' | $(LOCK) - --output-file requirements/build.txt
	$(LOCK) pyproject.toml --extra train --output-file requirements/run.txt
	$(LOCK) pyproject.toml --extra test --output-file requirements/test.txt
	echo 'jax[tpu]' | $(LOCK) - --output-file requirements/tpu.txt
	echo 'jax[cuda12]' | $(LOCK) - --output-file requirements/cuda12.txt

clean:
	rm -rf $(VENV) $(PEERS) $(AOT) $(DOCS) $(INSTALLED) build dist site *.egg-info

$(VENV)/bin/python:
	@echo "making a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml requirements/build.txt requirements/run.txt | $(VENV)/bin/python
	@echo "installing compmod_jax and what it needs (about a minute)"
	@$(VENV)/bin/pip install $(LOCKED) --requirement requirements/build.txt
	@$(VENV)/bin/pip install $(LOCKED) --requirement requirements/run.txt
	@$(VENV)/bin/pip install $(THIS)
	@touch $@

$(VENV)/.test: $(VENV)/.run requirements/test.txt
	@echo "installing what the tests need"
	@$(VENV)/bin/pip install $(LOCKED) --requirement requirements/test.txt
	@touch $@

# PyTorch by itself, as no other file of this checkout has a part in it.
$(PEERS)/.torch: constraints.txt
	@echo "installing PyTorch in $(PEERS)"
	@$(PYTHON) -m venv $(PEERS)
	@$(PEERS)/bin/pip install $(PIP_FLAGS) torch==2.13.0
	@touch $@

$(PEERS)/.peers: $(PEERS)/.torch pyproject.toml constraints.txt
	@echo "installing transformers and CTranslate2 in $(PEERS)"
	@$(PEERS)/bin/pip install $(PIP_FLAGS) --editable '.[test,peers]'
	@touch $@

# The compilers want the JAX of constraints.txt, and would bring in more than they need.
$(AOT)/.aot: pyproject.toml constraints.txt
	@echo "installing compilers for TPUs and NVIDIA GPUs in $(AOT) (about 2 GB)"
	@$(PYTHON) -m venv $(AOT)
	@$(AOT)/bin/pip install $(PIP_FLAGS) --editable '.[test]'
	@$(AOT)/bin/pip install $(PIP_FLAGS) --no-deps libtpu==0.0.42.1 \
	  jax-cuda12-pjrt==0.10.2 jax-cuda12-plugin==0.10.2 nvidia-cuda-nvcc-cu12==12.9.86
	@touch $@

$(DOCS)/.docs: pyproject.toml constraints.txt
	@echo "installing MkDocs, and what its pages run, in $(DOCS)"
	@$(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/pip install $(PIP_FLAGS) --editable '.[test,docs]'
	@touch $@
