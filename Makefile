# Every target sets up what it needs by itself (tools/setup_env.py); nothing is made twice.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:

PYTHON ?= python3
SETUP := $(PYTHON) tools/setup_env.py
DEV := .venv/bin
ENGINE := .venv-engine/bin
PACKAGES := maru_shm maru_server maru_sidecar maru_connector
LOGS := .cache/test-logs
PYTEST_ARGS ?=
# unit tests that import vLLM or torch; without them (test-fast) they are skipped
NEED_VLLM := $(wildcard tests/unit/test_connector_*.py)

.PHONY: help setup lint format test test-fast test-engine demo demo-p2p demo-pd clean distclean

help:
	@echo "make demo         cold engine, warm engine, same prompts: times, hits, identical outputs (one to two minutes)"
	@echo "make demo-p2p     two sidecars on one shared pool: engine B loads what engine A computed"
	@echo "make demo-pd      prefill on one engine, decode on another, through a shared pool"
	@echo "make test         lint, then every test, real vLLM engine included"
	@echo "make lint         ruff and mypy"
	@echo "make test-fast    every test that needs no vLLM"
	@echo "make test-engine  the tests against vLLM's schedulers and a real CPU engine"
	@echo "make format       let ruff rewrite the files"
	@echo "make clean        forget test and tool caches;  make distclean: environments, model and sources too"

setup:
	$(SETUP) all

lint:
	$(SETUP) dev
	$(DEV)/ruff check --extend-exclude .cache .
	$(DEV)/ruff format --check --extend-exclude .cache .
	for package in $(PACKAGES); do $(DEV)/mypy -p $$package; done
	$(DEV)/mypy tools/setup_env.py

format:
	$(SETUP) dev
	$(DEV)/ruff format --extend-exclude .cache .
	$(DEV)/ruff check --fix --extend-exclude .cache .

# The closing line of each pytest run is printed again at the very end, and any failure fails the whole.
test:
	$(SETUP) all
	@status=0; \
	$(MAKE) --no-print-directory lint || status=1; \
	$(MAKE) --no-print-directory test-fast || status=1; \
	$(MAKE) --no-print-directory test-engine || status=1; \
	echo; for log in fast engine; do echo "$$log:"; tail -n 1 $(LOGS)/$$log.log || status=1; done; \
	if [ $$status -ne 0 ]; then echo "make test: FAILED"; fi; exit $$status

test-fast:
	$(SETUP) system dev
	@mkdir -p $(LOGS)
	$(DEV)/python -m pytest tests --ignore=tests/engine $(PYTEST_ARGS) 2>&1 | tee $(LOGS)/fast.log

test-engine:
	$(SETUP) engine model sources
	@mkdir -p $(LOGS)
	MARU_ENGINE_DEVICE=cpu $(ENGINE)/python -m pytest tests/engine tests/gpu/test_engine.py tests/gpu/test_engine_layout.py $(NEED_VLLM) $(PYTEST_ARGS) 2>&1 | tee $(LOGS)/engine.log

demo:
	$(SETUP) engine model
	$(ENGINE)/python examples/single/demo.py

demo-p2p:
	$(SETUP) engine model
	$(ENGINE)/python examples/p2p_sharing/demo.py

demo-pd:
	$(SETUP) engine model
	$(ENGINE)/python examples/prefill_decode/demo.py

clean:
	rm -rf $(LOGS) .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv .venv-engine .cache
