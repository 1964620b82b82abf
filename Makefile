# Needs Python >= 3.11 and make; everything else goes into .venv.
#   make quickstart   train a small model on Shakespeare and sample from it
#   make test         lint, types and the suite (under 12 minutes on two cores)
#   make test-slow    the tests marked slow (under 25 minutes more)
#   make test-all     both, and what only sweeps: for who touched what a sweep covers
#   make test-torch   exported models in PyTorch and transformers, which it fetches into
#                     .venv-torch (on Linux with what CUDA needs, several GB, where pip
#                     finds no CPU build) unless RECURJAX_TORCH_PYTHON names an
#                     interpreter that has them
#   make test-python312  the suite on Python 3.12 with jax 0.12, in .venv-3.12
#   make test-lowering   lowers every op's kernels with jax 0.11.2 and 0.12, on Python
#                     3.12, in environments of their own: a warning is an error
#   make docs         build the site into site/ (python -m http.server -d site shows it)
#   make docs-notebooks  run all notebooks (ten minutes); the site then has their outputs
#   make compilers    fetch the TPU and CUDA compilers and Triton (2.2 GB on disk), which
#                     show here that the kernels compile for devices that are not here,
#                     and what registers and shared memory they take
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
MADE := $(VENV)/.python-$(VERSION)
# Python compiles what it imports at the first import: half of what pip would take.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
# A test process for each core, from two to eight, with one XLA thread each.
TEST_ENV := JAX_PLATFORMS=cpu NPROC=1 OMP_NUM_THREADS=1 TF_CPP_MIN_LOG_LEVEL=2
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(max(2, min(8, os.cpu_count() or 2)))')
# Neighbours share compiled programs: each process takes its part of the list, in order.
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=10

.PHONY: quickstart test lint test-slow test-all test-torch test-python312 test-lowering compilers fetched docs docs-notebooks format clean

quickstart: $(VENV)/.installed
	$(BIN)/python experiments/quickstart.py

test: lint
	$(PYTEST) -m "not slow"

test-slow: $(VENV)/.installed-test
	RECURJAX_TEST_SHAPES=0 $(PYTEST) -m "slow and not sweep"

test-all: lint
	$(PYTEST)

# In an interpreter of its own: what torch wants of others need not be what we want.
TORCH_TESTS := tests/convert/test_to_torch.py tests/convert/test_auto_model.py \
  tests/experiments/test_torch_export_parity.py tests/experiments/test_compare_with_torch.py \
  tests/data/test_transformers.py tests/training/test_torch_peer.py tests/cli/test_push.py \
  tests/convert/test_peft.py tests/pallas_kernels/gated_scan/test_triton_values.py \
  tests/pallas_kernels/selective_scan/test_triton_values.py
TORCH_PYTHON := $(or $(RECURJAX_TORCH_PYTHON),$(CURDIR)/.venv-torch/bin/python)
TORCH_FETCHED := $(if $(RECURJAX_TORCH_PYTHON),,.venv-torch/.installed)
test-torch: $(VENV)/.installed-test $(TORCH_FETCHED)
	RECURJAX_TEST_SHAPES=0 RECURJAX_TORCH_PYTHON=$(TORCH_PYTHON) $(PYTEST) -m "torch and not sweep" $(TORCH_TESTS)

# What constraints.txt pins for Python 3.12. The compilers in .compilers belong to the jax
# of .venv: tests that ask them skip.
PYTHON312 ?= python3.12
test-python312:
	RECURJAX_COMPILERS=$(CURDIR)/.compilers-3.12 $(MAKE) PYTHON=$(PYTHON312) VENV=.venv-3.12 test

LOWERED := 0.11.2 0.12.0.1
test-lowering: $(LOWERED:%=.venv-jax-%/.installed)
	for version in $(LOWERED); do \
	  JAX_PLATFORMS=cpu PYTHONPATH=. .venv-jax-$$version/bin/python -m tests.lowering || exit 1; \
	done

.venv-jax-%/.installed: constraints.txt
	$(PYTHON312) -m venv .venv-jax-$*
	grep -vE '^jax(lib|-cuda12-.*)?==' constraints.txt > .venv-jax-$*/constraints.txt
	.venv-jax-$*/bin/python -m pip install --quiet --disable-pip-version-check --constraint .venv-jax-$*/constraints.txt \
	  jax==$* jaxlib==$* jax-cuda12-plugin==$* jaxtyping jax-triton triton
	@touch $@

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# What CI fetches beside the tests' environment.
fetched: compilers $(TORCH_FETCHED)

# Apart from the environment: their plugins would disturb every start on a CPU.
# What is there in the constraints' versions stays: it takes minutes to fetch.
compilers: $(VENV)/.installed
	$(BIN)/recurjax compilers --into .compilers --constraint constraints.txt

# Warnings, dead links among them, end it. The variable hides an advertisement.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(TEST_ENV) $(BIN)/python -m mkdocs build --quiet

docs-notebooks: $(VENV)/.installed-docs
	rm -rf .executed && mkdir .executed && cp -r notebooks .executed/
	cd .executed/notebooks && $(CURDIR)/$(BIN)/python -m nbconvert --to notebook --execute --inplace --log-level WARN *.ipynb

clean:
	rm -rf $(VENV) .venv-torch .venv-3.12 .venv-jax-* .executed site

# Another interpreter makes the environment anew.
$(MADE):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "recurjax needs Python 3.11 or newer, $(PYTHON) is $(VERSION): make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	@touch $@

# What a build needs comes first, so that pip fetches no second jaxlib for its headers.
$(VENV)/.installed: $(MADE) pyproject.toml setup.py constraints.txt $(wildcard pallas_kernels/cpu/*.cc pallas_kernels/cpu/*.h)
	@echo "installing into $(VENV) (up to a minute)"
	$(PIP) 'setuptools>=77' jaxlib
	$(PIP) --no-build-isolation --editable .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "installing what the tests need"
	$(PIP) --no-build-isolation --editable '.[test]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	@echo "installing what the site needs"
	$(PIP) --no-build-isolation --editable '.[docs]'
	@touch $@

.venv-torch/.installed: constraints.txt
	$(PYTHON) -m venv .venv-torch
	@echo "installing PyTorch and transformers into .venv-torch"
	.venv-torch/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch transformers peft numpy safetensors
	@touch $@
