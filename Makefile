# Everything starts here: `make help` lists the targets. Set PYTHON, VENV or TORCH on the command line to change them.
PYTHON ?= python3
VENV ?= .venv
# On a machine with a GPU set TORCH to the build that fits it; the default is what the tests run with, on the CPU.
TORCH ?= torch==2.13.0
# FAMILY names one of the demo checkpoints; CHECKPOINT may be any folder.
FAMILY ?=
DEMO_qwen := demo/checkpoints/qwen3_vl_digits
DEMO_granite := demo/checkpoints/granite4_vision_digits
UNKNOWN_FAMILY = $(error FAMILY=$(FAMILY) is not known; known are qwen, granite)
CHECKPOINT ?= $(if $(FAMILY),$(or $(DEMO_$(FAMILY)),$(UNKNOWN_FAMILY)),$(or $(DEEPSTACK_CHECKPOINT),$(DEMO_qwen)))
TOOL ?= perf_analyzer
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PERF_ANALYZER := build/bench/perf_analyzer
# A settings file names its own checkpoint, unless another one is asked for.
IS_DEFAULT := $(if $(FAMILY)$(DEEPSTACK_CHECKPOINT)$(filter-out file,$(origin CHECKPOINT)),,yes)
SERVE_ENVIRONMENT := $(if $(and $(DEEPSTACK_SETTINGS_FILE),$(IS_DEFAULT)),,DEEPSTACK_CHECKPOINT=$(CHECKPOINT))

.DEFAULT_GOAL := help
.PHONY: help setup demo serve test test-gpu check format bench perf audit evaluate clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(INSTALLED)  ## Make the virtual environment and install everything into it

$(INSTALLED): pyproject.toml client/pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV); the first time takes some minutes"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ./client -e '.[embedded,video,dev]'
	@touch $@

demo: $(INSTALLED)  ## Start the embedded server, ask the demo checkpoint about a picture, stop
	$(BIN)/python -m demo.run --checkpoint $(CHECKPOINT)

$(PERF_ANALYZER): | $(INSTALLED)
	@echo "fetching perf_analyzer, once"
	@timeout 120 $(BIN)/python -m bench.tools 2>/dev/null || echo "not to be had here: serving without it (make perf says why)"

serve: $(INSTALLED) $(PERF_ANALYZER)  ## Serve CHECKPOINT until Ctrl-C, and print commands to try
	$(SERVE_ENVIRONMENT) $(BIN)/deepstack serve --example-image demo/pictures/example_1.png --example-question "What is the number?" --perf-analyzer $(PERF_ANALYZER)

test: $(INSTALLED)  ## Run the CPU test suite
	$(BIN)/python -m pytest

test-gpu: $(INSTALLED)  ## Run the tests that need a GPU
	$(BIN)/python -m pytest tests/gpu -vv

check: $(INSTALLED)  ## Lint, types and the rules of the project's own structure
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy src client/deepstack_client demo bench
	for model in model_repository/*/1/model.py; do $(BIN)/mypy $$model || exit 1; done
	$(BIN)/python -m pytest tests/contract

format: $(INSTALLED)  ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

evaluate: $(INSTALLED)  ## Score the demo checkpoint on held-out digits through the running server
	$(BIN)/python -m bench.evaluate --checkpoint $(CHECKPOINT)

bench: $(INSTALLED)  ## Measure this server beside transformers' generate; results go to build/bench/results
	$(BIN)/python -m bench.cpu

perf: $(INSTALLED)  ## Load-test with TOOL=perf_analyzer or TOOL=aiperf
	$(BIN)/python -m bench.perf --tool $(TOOL) --checkpoint $(CHECKPOINT)

audit: $(INSTALLED)  ## Show that visual features reach the answers of a server of CHECKPOINT, eagerly and in graphs
	$(BIN)/deepstack audit --start-server --checkpoint $(CHECKPOINT)

clean:  ## Remove what the targets made
	rm -rf $(VENV) build dist .cache .mypy_cache .ruff_cache .pytest_cache client/build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
