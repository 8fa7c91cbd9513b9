# One command each. PYTHON has torch and the extras: pip install torch && pip install '.[test,bench,dev]'
PYTHON ?= python3
ARGS ?=
CLANG_FORMAT ?= $(shell $(PYTHON) -c "import sysconfig; print(sysconfig.get_path('scripts'))")/clang-format
C_FILES = $(shell find include csrc tests/c benchmarks/kernels examples -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh')
GPU_TESTS = tests/gpu tests/optim/test_gpu.py tests/tools/test_timing.py $(wildcard tests/tools/test_cuda_*.py)
IN_PLACE = PYTHONPATH=python $(PYTHON)
BENCHMARKS = $(filter-out benchmarks/show.py benchmarks/tables.py benchmarks/pictures.py benchmarks/ablations.py,$(wildcard benchmarks/[a-z]*.py))

.PHONY: help build smoke test test-all wheels bench sanitize fuzz neon gpu format lint clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /make \1	/p' Makefile

build: ## compile into python/recfuse, for use with PYTHONPATH=python
	$(PYTHON) setup.py -q build_ext --inplace

smoke: build ## a test or two of each operator, less than a minute
	$(IN_PLACE) -m pytest tests/smoke $(ARGS)

test: build ## every test but the long ones, in a process a core; ARGS='tests/passes/test_swap.py -k NAME' for some
	$(IN_PLACE) -m pytest $(ARGS)

test-all: build ## every test, as CI runs them
	$(IN_PLACE) -m pytest --all $(ARGS)

wheels: ## dist: the files of a release, on x86-64 (Debian: gcc-aarch64-linux-gnu libc6-dev-arm64-cross)
	$(PYTHON) -m build
	CC=aarch64-linux-gnu-gcc $(PYTHON) -m build --wheel

bench: build ## every benchmark; ARGS=--help and the like go to each
	set -e; for script in $(BENCHMARKS); do echo "== $$script"; $(IN_PLACE) $$script $(ARGS); done

sanitize: build ## the C tests under the address, undefined-behaviour and thread sanitizers
	$(IN_PLACE) -m pytest tests/c/test_c_api.py tests/c/test_cuda_*.py -v -rs -k "sanitizer or address or thread" $(ARGS)

fuzz: build ## mutated files for every reader, 10 minutes
	$(IN_PLACE) tests/readers/fuzz_readers.py $(ARGS)

neon: build ## the C tests for aarch64 in an emulator (Debian: gcc-aarch64-linux-gnu qemu-user)
	command -v aarch64-linux-gnu-gcc
	command -v qemu-aarch64 || command -v qemu-aarch64-static
	$(IN_PLACE) -m pytest tests/c/test_c_api.py -v -rs -k neon_emulated $(ARGS)

gpu: build ## the tests that need a GPU, or two
	$(IN_PLACE) -m pytest $(GPU_TESTS) -v -rs $(ARGS)

format: ## rewrite C and Python in the project's form
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .
	$(CLANG_FORMAT) -i $(C_FILES)

lint: build ## what format would change, and the rules for C source, rooms and documents
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(CLANG_FORMAT) --dry-run --Werror $(C_FILES)
	$(IN_PLACE) -m pytest tests/tools/test_lint.py tests/tools/test_rooms.py tests/tools/language $(ARGS)

clean: ## remove what builds and tests leave
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis python/*.egg-info python/recfuse/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
