# Two commands do all the set-up on a fresh machine with Python 3.11+ and make:
#   make bench   creates the environment, runs the main job, prints where the report is
#   make test    everything that must hold
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VERL_VENV := .venv-verl
VERL_READY := $(VERL_VENV)/.ready
PIP := install --quiet --disable-pip-version-check
BENCH_ARGS ?=
TEST_ARGS ?=

.PHONY: bench test test-verl lint clean

bench: $(READY)
	$(BIN)/padless bench --html reports/bench.html --json reports/bench.json $(BENCH_ARGS)

test: lint
	$(BIN)/python -m pytest -n auto --dist loadfile $(TEST_ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-verl: $(VERL_READY)
	$(VERL_VENV)/bin/python -m pytest tests/integrations/verl $(TEST_ARGS)

# verl has an environment of its own: it needs an older transformers, and its wheel installs the top-level packages
# `tests` and `scripts`, which would hide ours. TransferQueue, fastapi, uvicorn and cachetools are imported but not declared.
# verl 0.7.1 lies beside it, without dependencies, for the tests of the fixed padding of 0.5 to 0.7.
$(VERL_READY): pyproject.toml constraints-verl.txt
	test -x $(VERL_VENV)/bin/python || $(PYTHON) -m venv $(VERL_VENV)
	$(VERL_VENV)/bin/python -m pip $(PIP) "$$(grep '^torch==' constraints-verl.txt)"
	$(VERL_VENV)/bin/python -m pip $(PIP) -c constraints-verl.txt \
		verl==0.9.1 TransferQueue fastapi uvicorn cachetools numba hypothesis pytest pytest-timeout
	$(VERL_VENV)/bin/python -m pip $(PIP) -c constraints-verl.txt --no-deps -e .
	$(VERL_VENV)/bin/python -m pip $(PIP) --no-deps --upgrade --target $(VERL_VENV)/verl-0.7 verl==0.7.1
	rm -rf $(VERL_VENV)/lib/python3.*/site-packages/tests $(VERL_VENV)/lib/python3.*/site-packages/scripts
	touch $@

# torch comes first and alone: it is pinned to a release that has a CPU build.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip $(PIP) "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip $(PIP) -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) $(VERL_VENV) reports dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
