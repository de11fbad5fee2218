# Every target is one script in scripts/; `make` alone lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup build test soak demo bench bench-check lint format clean clean-all offline-bundle

NAME ?= all
ARGS ?=
export PHASES V FUZZ_SECONDS

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## install what is missing: packages/apt.txt, and .venv from packages/python.txt and frameworks.txt
	@scripts/setup.sh

build: setup ## build the package into .venv: bin/forebay, bin/slowfs, import forebay
	@scripts/build.sh

test: setup ## everything that must pass: checks, C++ tests (plain, asan+ubsan, tsan), fuzzers, pytest, bench-check
	@scripts/test.sh

soak: setup ## the seeded tests with 1000 seeds, 10,000 clusters under faults, two minutes of each fuzzer
	@scripts/soak.sh

demo: build ## watch Forebay feed a training loop from slow storage
	@.venv/bin/forebay demo $(ARGS)

bench: build ## run benchmarks: make bench NAME=<name, default all> ARGS="--quick"
	@.venv/bin/pip install -q --disable-pip-version-check -r packages/bench.txt || echo "bench: some rivals could not be installed"
	@.venv/bin/forebay bench $(NAME) $(ARGS)

bench-check: build ## eight benches, short, against wide bounds: fails when a factor is lost (NAME=<name> for one)
	@scripts/bench_check.sh $(filter-out all,$(NAME)) $(ARGS)

lint: setup ## ruff, mypy, clang-format, include order, documents, shell syntax
	@scripts/lint.sh

format: setup ## rewrite C++ and Python to the house format
	@scripts/format.sh

clean: ## remove build outputs (.venv stays)
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache
	@rm -f .venv/.built

clean-all: clean ## remove build outputs, .venv and the offline bundle
	@rm -rf .venv offline

offline-bundle: setup ## gather in offline/ what a machine without packages needs to build
	@scripts/offline_bundle.sh
