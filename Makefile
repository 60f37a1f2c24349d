# Every target uses the environment in $(VENV) and makes it first if it is missing.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
OUT ?= demo
export PYTHONSAFEPATH = 1

.PHONY: help demo test environment lint typecheck test-slow fuzz kill-test validate-all validate-sampled bild-frontier \
	reproducible budget-check align-builtin bench gpu-check clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

environment: $(VENV)/.installed  ## the virtual environment, with everything installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hsdopt needs Python 3.11 or later: name one with PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	rm -rf build
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[all]" --group test --group lint
	touch $@

demo: environment  ## profile, solve and validate the built-in models on `mixed`
	./scripts/demo.sh $(BIN) $(OUT)

test: environment  ## the fast tests (minutes)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto

test-slow: environment  ## the tests that need the built-in models or much time
	$(BIN)/hsdopt models fetch
	$(BIN)/pytest -m "slow"

fuzz: environment  ## 20,000 damaged plans, profiles, journals and prompts: nothing but clean errors (minutes)
	HSDOPT_FUZZ=$${HSDOPT_FUZZ:-20000} OMP_NUM_THREADS=1 $(BIN)/pytest -n auto -rP tests/test_fuzz.py

kill-test: environment  ## 50 kills of profile, validate and align at random moments: nothing saved is lost (half an hour)
	HSDOPT_KILLS=$${HSDOPT_KILLS:-50} OMP_NUM_THREADS=1 $(BIN)/pytest -rP tests/test_kills.py

validate-all: environment  ## the three workloads (up to an hour; continues where it was stopped)
	./scripts/validate_all.sh $(BIN) validation

validate-sampled: environment  ## the three workloads at temperature 1 (continues where it was stopped)
	TEMPERATURE=1 ./scripts/validate_all.sh $(BIN) validation-sampled

bild-frontier: environment  ## quality against latency of Big Little Decoder on the built-in models (minutes)
	./scripts/bild_frontier.sh $(BIN) frontier

reproducible: environment  ## two profiles of the built-in models, one after the other, against each other (minutes)
	./scripts/reproducible.sh $(BIN) reproducible

budget-check: environment  ## the pick of a profile under a budget against that of one ten times as long
	$(BIN)/python scripts/budget_check.py budget

align-builtin: environment  ## train the drafters of the built-in target (some two hours), then profile and validate them
	./scripts/align_builtin.sh $(BIN) drafters 20
	./scripts/validate_ladder.sh $(BIN) drafters drafters/mixed

bench: environment  ## solver and simulator speed
	$(BIN)/pytest tests/bench_*.py --benchmark-only

gpu-check: environment  ## the tests that need a CUDA device, and a short profile, solve and validate on it
	$(BIN)/pytest -m gpu
	./scripts/gpu_check.sh $(BIN)

lint: environment  ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: environment  ## mypy over the package as it ships
	rm -rf build
	$(BIN)/python -m pip install --quiet --no-deps --target build/typecheck .
	cd build/typecheck && $(abspath $(BIN))/mypy --config-file ../../pyproject.toml -p hsdopt

clean:  ## remove what the targets made (the environment too)
	rm -rf $(VENV) build dist demo gpu-check frontier reproducible budget
