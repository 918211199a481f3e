# What a developer and CI run. The programs of the environment are called by path, never as `python -m` from here:
# this folder holds `kernels/`, and transformers looks for a top-level package of that name.

# Tests start hundreds of processes: what one of them has compiled, the others need not compile again.
export PYTHONDONTWRITEBYTECODE :=

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# What environments are made with: the first of these that is Python 3.11 or 3.12 and has venv.
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do $$p -c 'import ensurepip, sys, venv; \
	sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null && echo $$p && break; done)

# The oldest transformers that the adapter is tested with; constraints.txt pins the newest.
OLD_TRANSFORMERS := transformers==5.17.*

# How long `make fuzz` looks, and `make chaos` goes on.
MINUTES ?= 30

# Processes of `make soak` and `make chaos`.
JOBS ?= 2

.PHONY: help setup demo check test test-long test-tf517 test-sglang test-vllm docs fuzz mutants planted soak chaos evidence clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

setup: .venv/.stamp ## make .venv, with the package and the tools (done once)

demo: .venv/.stamp ## see corruption found, on the CPU
	.venv/bin/kv-canary demo

check: .venv/.stamp ## lint, formatting, types
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
# mypy does not follow setuptools' package-dir, so it gets a folder of links in the shape of the installed package.
	rm -rf .venv/typecheck
	mkdir -p .venv/typecheck/kv_canary
	ln -s "$$PWD"/kv_canary/* "$$PWD"/{bench,difftest,kernels,reference} .venv/typecheck/kv_canary/
	MYPYPATH=.venv/typecheck .venv/bin/mypy .venv/typecheck/kv_canary

test: check ## check, then the tests, Triton in its interpreter
	.venv/bin/pytest -n 2 --dist worksteal --benchmark-disable --examples 30 -m 'not tf517 and not long' --ignore tests/sglang --ignore tests/vllm

test-long: .venv/.stamp .venv-sglang/.stamp .venv-vllm/.stamp ## the tests that take long, SGLang's and vLLM's too
	.venv/bin/pytest -n 2 --benchmark-disable -m 'long and not tf517' --ignore tests/sglang --ignore tests/vllm
	.venv/bin/pytest -n 2 --examples 400 tests/difftest/test_every_op.py tests/difftest/test_naive.py
	OMP_NUM_THREADS=1 .venv-sglang/bin/pytest -n 2 --dist loadscope -m long tests/sglang
	OMP_NUM_THREADS=1 .venv-vllm/bin/pytest -n 2 --dist worksteal -m long tests/vllm

test-tf517: .venv-tf517/.stamp ## the adapter's tests with the oldest transformers, in .venv-tf517
	.venv-tf517/bin/pytest -n 2 --benchmark-disable -m 'not long' tests/engines

test-sglang: .venv-sglang/.stamp ## the adapter in SGLang's own engine, on the CPU, in .venv-sglang
	OMP_NUM_THREADS=1 .venv-sglang/bin/pytest -n 2 --dist loadscope -m 'not long' tests/sglang

test-vllm: .venv-vllm/.stamp ## the adapter in vLLM's own engine, on the CPU, in .venv-vllm
	OMP_NUM_THREADS=1 .venv-vllm/bin/pytest -n 2 --dist worksteal -m 'not long' tests/vllm

# From scratch each time: what has not changed is not read again, and what is wrong there would not be said again.
docs: .venv-docs/.stamp ## the pages and a reference of the API as a site in build/docs; a dead link is an error
	rm -rf build/docs
	.venv-docs/bin/sphinx-build --quiet --fail-on-warning --fresh-env --jobs 2 --conf-dir docs --doctree-dir build/doctrees . build/docs
	@echo "build/docs/index.html"

fuzz: .venv/.stamp ## look for differences between kernels and references for half an hour (MINUTES=...)
	.venv/bin/kv-canary difftest fuzz --minutes $(MINUTES) --database .hypothesis/examples

mutants: .venv/.stamp ## change sources one by one: does a test notice each? (MUTANTS="--part kernels")
	.venv/bin/kv-canary difftest mutants $(MUTANTS)

planted: .venv/.stamp ## how long fuzzing takes to find bugs that were planted
	.venv/bin/kv-canary difftest planted

# With -P Python leaves this folder out of its path.
soak: .venv/.stamp ## healthy engines stay silent, injected faults are found (JOBS=...); writes both to bench/results
	.venv/bin/kv-canary stress soak --jobs $(JOBS) --json bench/results/soak.json
	.venv/bin/kv-canary stress detection --jobs $(JOBS) --json bench/results/detection.json

chaos: .venv/.stamp ## the canary itself fails at random, and no engine notices (MINUTES=..., JOBS=...)
	.venv/bin/kv-canary stress chaos --minutes $(MINUTES) --jobs $(JOBS)

evidence: .venv/.stamp ## which measured results are of this code, and do the pages that quote them say so
	.venv/bin/kv-canary evidence

clean: ## remove environments, builds and caches; found counterexamples stay
	rm -rf .venv .venv-tf517 .venv-sglang .venv-vllm .venv-docs build dist *.egg-info tests/{sglang,vllm}/environment/*.egg-info .benchmarks .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.stamp: constraints.txt pyproject.toml setup.py kv_canary/engines/sglang/_items.c
	$(call install,.venv,cat constraints.txt,-e '.[dev]')

# All that .venv has, but for its transformers: pytest comes along so that its program is of this environment.
.venv-tf517/.stamp: .venv/.stamp
	test -x .venv-tf517/bin/python || .venv/bin/python -m venv --without-pip .venv-tf517
	packages='import site; print(site.getsitepackages()[0])'; \
	echo "import site; site.addsitedir('$$(.venv/bin/python -c "$$packages")')" \
		> "$$(.venv-tf517/bin/python -c "$$packages")/beside.pth"
	grep -v '^transformers==' constraints.txt > .venv-tf517/constraints.txt
	pip="$$PWD/.venv/bin/pip --python .venv-tf517/bin/python install -q --no-compile -c .venv-tf517/constraints.txt"; \
	$$pip '$(OLD_TRANSFORMERS)' && $$pip --no-deps --ignore-installed pytest
	touch .venv-tf517/.stamp

.venv-docs/.stamp: constraints.txt pyproject.toml
	$(call install,.venv-docs,cat constraints.txt,-e '.[docs]')

.venv-sglang/.stamp: constraints-sglang.txt pyproject.toml setup.py kv_canary/engines/sglang/_items.c tests/sglang/environment/pyproject.toml
	$(call install,.venv-sglang,cat constraints-sglang.txt,--no-deps -r .venv-sglang/constraints.txt -e . -e tests/sglang/environment)

.venv-vllm/.stamp: constraints-vllm.txt pyproject.toml tests/vllm/environment/pyproject.toml
	$(call install,.venv-vllm,cat constraints-vllm.txt,--no-deps -r .venv-vllm/constraints.txt -e . -e tests/vllm/environment)

# $(call install,folder,command,packages): make an environment of the packages, in the versions that `command` prints.
# torch comes first and by itself: the build that pip prefers (a local CPU one, say) is taken, and then pinned to the
# letter so that nothing replaces it. Nothing is compiled before it is imported. A CUDA build brings the Triton that it
# was made with; the pin is for the others.
define install
	test -x $(1)/bin/pip || $(or $(PYTHON),$(error kv-canary: setup needs Python 3.11 or 3.12 with venv: make setup PYTHON=...)) -m venv $(1)
	$(2) | grep -v '^triton==' > $(1)/constraints.txt
	$(1)/bin/pip install -q --no-compile -c $(1)/constraints.txt torch setuptools
	$(1)/bin/pip show torch | grep -q '^Requires:.*triton' || $(2) | grep '^triton==' >> $(1)/constraints.txt
	$(1)/bin/pip freeze --all | grep '^torch==' >> $(1)/constraints.txt
	$(1)/bin/pip install -q --no-compile -c $(1)/constraints.txt --no-build-isolation $(3)
	touch $(1)/.stamp
endef
