# SPDX-License-Identifier: Apache-2.0
#
# make demo    builds what is needed and trains a small language model on real text (under 6 minutes)
# make test    builds everything and runs every test
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory  # and those that CMake starts
JOBS ?= $(shell nproc)
BUILD ?= build
PYTHON ?= python3
VENV ?= .venv
export VENV_TORCH ?= .venv-torch

.PHONY: help
help:  ## this list
	@echo "fovea: exact fused attention, forward and backward"
	@grep -hE '^[a-z-]+:.*?## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 24

.PHONY: deps
deps:
	@tools/deps.sh build

$(BUILD)/CMakeCache.txt:
	cmake --preset release -B $(BUILD) >$(BUILD).log 2>&1 || { cat $(BUILD).log; exit 1; }
	@rm -f $(BUILD).log

.PHONY: build
build: deps $(BUILD)/CMakeCache.txt  ## libfovea.so, the command and the Python package in this checkout
	cmake --build $(BUILD) -j$(JOBS) --target fovea fovea_cli

.PHONY: demo
demo: deps $(BUILD)/CMakeCache.txt  ## train a small language model on real text through fovea, forward and backward
	cmake --build $(BUILD) -j$(JOBS) --target train_lm
	$(BUILD)/examples/train_lm/train_lm $(DEMO_ARGS)

$(VENV)/.ready: tests/requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q --disable-pip-version-check -r $<
	touch $@

.PHONY: test
test:  ## every test: C++, Python, documentation, packaging; the last line counts them
	@tools/deps.sh build test
	@$(MAKE) --no-print-directory $(BUILD)/CMakeCache.txt $(VENV)/.ready
	$(VENV)/bin/python tools/test.py --build $(BUILD) --jobs $(JOBS) --lanes 2 --report $(BUILD)/tests.json build cpp python

# PyTorch's own environment: 5.4 GB, kept between runs (and by `make clean`).
$(VENV_TORCH)/.ready: tests/requirements.txt
	$(PYTHON) -m venv $(VENV_TORCH)
	@start=$$SECONDS; $(VENV_TORCH)/bin/pip install -q --disable-pip-version-check torch pytest numpy $$(grep '^mypy==' $<) && \
	    echo "pip install torch: $$((SECONDS - start)) s, $$(du -sh $(VENV_TORCH) | cut -f1)"
	touch $@

# The oldest PyTorch that is supported (docs/versions.md), in an environment of its own: 7 GB, kept likewise.
export VENV_TORCH_OLDEST ?= .venv-torch-oldest
$(VENV_TORCH_OLDEST)/.ready: tests/requirements.txt
	$(PYTHON) -m venv $(VENV_TORCH_OLDEST)
	$(VENV_TORCH_OLDEST)/bin/pip install -q --disable-pip-version-check 'torch==2.9.*' pytest numpy $$(grep '^mypy==' $<)
	touch $@

.PHONY: test-torch
test-torch:  ## fovea.torch, in an environment of its own with the newest PyTorch; the last line counts the tests
	@tools/deps.sh build
	@$(MAKE) --no-print-directory $(BUILD)/CMakeCache.txt $(VENV_TORCH)/.ready
	cmake --build $(BUILD) -j$(JOBS) --target fovea
	$(VENV_TORCH)/bin/python tools/test.py --build $(BUILD) torch

# JAX's own environment: 0.8 GB, kept between runs.
VENV_JAX ?= .venv-jax
$(VENV_JAX)/.ready: tests/jax/requirements.txt
	$(PYTHON) -m venv $(VENV_JAX)
	$(VENV_JAX)/bin/pip install -q --disable-pip-version-check -r $<
	touch $@

.PHONY: test-jax
test-jax:  ## fovea.jax on the CPU, in an environment of its own; the last line counts the tests
	@tools/deps.sh build
	@$(MAKE) --no-print-directory $(BUILD)/CMakeCache.txt $(VENV_JAX)/.ready
	cmake --build $(BUILD) -j$(JOBS) --target fovea fovea_fake_cuda fovea_fake_nvrtc
	$(VENV_JAX)/bin/python tools/test.py --build $(BUILD) jax

# The libraries of a part of tests/models, beside PyTorch's environment, which stays without them: tests need it so.
VENV_INTEGRATIONS ?= .venv-integrations
XFORMERS := xformers==0.0.35
$(VENV_INTEGRATIONS)/.ready: tests/models/requirements.txt $(VENV_TORCH)/.ready
	$(PYTHON) -m venv $(VENV_INTEGRATIONS)
	$(VENV_TORCH)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	    >"$$($(VENV_INTEGRATIONS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch.pth"
	$(VENV_INTEGRATIONS)/bin/pip install -q --disable-pip-version-check $$(grep -E '^(accelerate|diffusers|kernels|transformers)==' $<)
	$(VENV_INTEGRATIONS)/bin/pip install -q --disable-pip-version-check --no-deps $$(grep '^megatron-core==' $<) $(XFORMERS)
	touch $@

# Models of other libraries, in an environment of their own: 6 GB, kept between runs.
VENV_MODELS ?= .venv-models
$(VENV_MODELS)/.ready: tests/models/requirements.txt
	$(PYTHON) -m venv $(VENV_MODELS)
	$(VENV_MODELS)/bin/pip install -q --disable-pip-version-check -r $<
	$(VENV_MODELS)/bin/pip install -q --disable-pip-version-check --no-deps $(XFORMERS)  # it pins another PyTorch
	# torchtitan wants a torchao that torchtune does not run with: a folder of its own.
	$(VENV_MODELS)/bin/pip install -q --disable-pip-version-check --no-deps --target $(VENV_MODELS)/torchtitan torchtitan==0.3.0 torchao==0.17.0
	# Of these the modules of triangle attention alone, without what else they need (CUDA, chemistry).
	$(VENV_MODELS)/bin/pip install -q --disable-pip-version-check --no-deps --target $(VENV_MODELS)/proteins boltz==2.2.1 protenix==2.0.0 \
	    openfold3==0.5.0 absl-py==2.5.1 biotite==1.6.0 biotraj==1.2.2 einops==0.8.2 gemmi==0.7.5 ml_collections==1.1.0 optree==0.20.0 scipy==1.17.1
	touch $@

.PHONY: test-models
test-models:  ## the integrations with the libraries themselves: models of transformers, diffusers, Megatron, Boltz and others
	@tools/deps.sh build
	@$(MAKE) --no-print-directory $(BUILD)/CMakeCache.txt $(VENV_MODELS)/.ready
	cmake --build $(BUILD) -j$(JOBS) --target fovea
	FOVEA_ALL_MODELS=1 FOVEA_BUILD=$(BUILD) $(VENV_MODELS)/bin/python -m pytest -q -s -p no:cacheprovider tests/models

.PHONY: test-emulated
test-emulated:  ## the GPU kernels on the CPU: more schedules, the reduced case table, random problems (an hour of CPU)
	@tools/deps.sh build test
	@$(MAKE) --no-print-directory $(BUILD)/CMakeCache.txt $(VENV)/.ready
	cmake --build $(BUILD) -j$(JOBS) --target fovea_cli fovea_emulated_cuda fovea_emulated_nvrtc
	EMULATED_SEEDS=12 EMULATED_TABLE=reduced EMULATED_RANDOM=100 $(VENV)/bin/python tools/test.py --build $(BUILD) emulated

.PHONY: check check-rest
check: test check-rest  ## make test, then the other stages, more than an hour of CPU (docs/testing.md): lint, sanitizers, fuzzing, ...
check-rest:
	$(VENV)/bin/python tools/test.py --build $(BUILD) --jobs $(JOBS) --lanes 2 --after $(BUILD)/tests.json \
	    tidy asan asantorch clang tsan torch torch_python models torch_oldest jax wheel lint kernels emulated fuzz readers nvrtc abi installed demo docs

.PHONY: kernels
kernels:  ## compile every GPU kernel that changed into tests/kernels/manifest.txt; goes on where it was stopped (no GPU)
	@tools/deps.sh build test
	@$(MAKE) --no-print-directory $(BUILD)/CMakeCache.txt $(VENV)/.ready
	cmake --build $(BUILD) -j$(JOBS) --target list_kernels
	$(VENV)/bin/python tools/kernels.py --build $(BUILD) --jobs $(JOBS)

VENV_DOCS ?= .venv-docs
$(VENV_DOCS)/.ready: docs/requirements.txt
	$(PYTHON) -m venv $(VENV_DOCS)
	$(VENV_DOCS)/bin/pip install -q --disable-pip-version-check -r $<
	touch $@

.PHONY: docs
docs:  ## the documentation site in docs/_build/html, without a warning or a dead link within it
	@tools/deps.sh build docs
	@$(MAKE) --no-print-directory $(BUILD)/CMakeCache.txt $(VENV_DOCS)/.ready
	cmake --build $(BUILD) -j$(JOBS) --target fovea
	rm -rf docs/_build
	FOVEA_LIBRARY=$(abspath $(BUILD))/libfovea.so $(VENV_DOCS)/bin/sphinx-build -q -W --keep-going -b html docs docs/_build/html
	@echo "docs/_build/html/index.html: $$(find docs/_build/html -name '*.html' | wc -l) pages"

# In an environment of its own, so that the compiler and the auditor are of one version each.
.venv-wheels/.ready: tools/wheels.txt
	$(PYTHON) -m venv .venv-wheels
	.venv-wheels/bin/pip install -q --disable-pip-version-check -r $<
	touch $@

.PHONY: wheels release
wheels: .venv-wheels/.ready  ## dist/: the source distribution and wheels for x86-64 and aarch64, checked (docs/release.md)
	@tools/deps.sh build
	.venv-wheels/bin/python tools/wheels.py --jobs $(JOBS)

release: .venv-wheels/.ready $(VENV)/.ready  ## the same from a clean tree, twice, the bits compared, tested, with checksums
	@tools/deps.sh build wheel
	.venv-wheels/bin/python tools/release.py --jobs $(JOBS)

.PHONY: bench
bench:  ## fovea's CPU speed beside the best matrix product of this machine (quiet, please: nothing else running)
	@tools/deps.sh build test bench
	@$(MAKE) --no-print-directory $(BUILD)/CMakeCache.txt $(VENV)/.ready
	cmake $(BUILD) >/dev/null && cmake --build $(BUILD) -j$(JOBS) --target fovea matmul_openblas matmul_onednn
	$(VENV)/bin/python bench/cpu/run.py --build $(BUILD) --json bench/results/cpu.json $(BENCH_ARGS)
	$(VENV)/bin/python tools/tables.py

.PHONY: format
format:  ## clang-format over everything
	@git ls-files '*.h' '*.cpp' '*.c' '*.cuh' | xargs clang-format -i

.PHONY: clean
clean:  ## remove what was built
	rm -rf build build-* $(VENV) $(VENV_DOCS) .venv-wheels docs/_build dist
