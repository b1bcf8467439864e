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
	$(BIN)/python -m pytest -n auto --dist loadgroup $(TEST_ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-verl: $(VERL_READY)
	$(VERL_VENV)/bin/python -m pytest tests/integrations/verl $(TEST_ARGS)

# torch comes first and alone: it is pinned to a release that has a CPU build.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip $(PIP) "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip $(PIP) -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) $(VERL_VENV) reports dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
