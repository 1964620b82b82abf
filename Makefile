# Needs Python >= 3.11 and make; everything else goes into .venv.
#   make quickstart   train a small model on Shakespeare and sample from it
#   make test         lint, types and the suite (under 15 minutes on two cores)
#   make test-slow    the tests marked slow (under 25 minutes more)
#   make compilers    fetch the TPU and CUDA compilers (1.2 GB on disk), which show here
#                     that the kernels compile for devices that are not here
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
MADE := $(VENV)/.python-$(VERSION)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# Two test processes share the machine: one XLA thread each is fastest on two cores.
TEST_ENV := JAX_PLATFORMS=cpu NPROC=1 OMP_NUM_THREADS=1 TF_CPP_MIN_LOG_LEVEL=2
WORKERS ?= 2

.PHONY: quickstart test lint test-slow compilers format clean

quickstart: $(VENV)/.installed
	$(BIN)/python experiments/quickstart.py

test: lint
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) -m "not slow" --durations=10

test-slow: $(VENV)/.installed-test
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) -m slow --durations=10

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Apart from the environment: their plugins would disturb every start on a CPU.
compilers: $(VENV)/.installed
	rm -rf .compilers
	$(PIP) --target .compilers --no-deps libtpu jax-cuda12-plugin jax-cuda12-pjrt

clean:
	rm -rf $(VENV)

# Another interpreter makes the environment anew.
$(MADE):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "recurjax needs Python 3.11 or newer, $(PYTHON) is $(VERSION): make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(MADE) pyproject.toml constraints.txt
	@echo "installing into $(VENV) (a minute or two)"
	$(PIP) --editable .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "installing what the tests need"
	$(PIP) --editable '.[test]'
	@touch $@
