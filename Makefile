# Every target installs what it needs. One environment, .venv; delete it to start anew.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Busy-waiting OpenMP threads halve the speed on shared cores.
export OMP_WAIT_POLICY ?= PASSIVE
export PYTHONUNBUFFERED := 1

.PHONY: install quickstart test check tables bench clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt mae_bench/detectron2.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m mae_bench doctor --install detectron2
	$(BIN)/python -m pip check
	@touch $@

quickstart: install
	$(BIN)/python -m mae_bench quickstart

test: check
	$(BIN)/python -m pytest -n 2

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# What is committed under results/tables is what the promoted records give; a test checks it.
tables: install
	$(BIN)/python -m mae_bench table --all

bench: install
	for script in benchmarks/*.py; do $(BIN)/python $$script || exit 1; done

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
