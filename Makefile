# make demo | make test: each does all the set-up it needs and is quick when run again.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
KVPOOL := $(BIN)/kvpool
JOBS ?= $(shell nproc)

# The list of Python files counts as well: an editable install knows its modules by name.
SOURCES := $(shell find include src cmake python -type f -not -name "*.pyc") CMakeLists.txt pyproject.toml
CPP_FILES = $(shell git ls-files '*.h' '*.cpp')

.DEFAULT_GOAL := help
.PHONY: help
help: ## what there is to make
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1|/' | column -t -s '|'

.PHONY: demo
demo: build model ## a real model answers a prompt through the block pool, next to mlx-lm's own cache
	@scripts/system_packages.sh blas || echo "Going on without OpenBLAS: reading the prompt takes longer"
	$(KVPOOL) generate --model smollm2 --fp32 --compare-stock --max-tokens 80 \
	  --prompt "What is a key-value cache in a language model? Answer in two sentences."

.PHONY: test
test: test-cpp test-python ## every test: C++, Python, and the real models that are prepared

.PHONY: test-cpp
test-cpp: system-test ## the C++ tests, an install test among them
	cmake --preset dev >build/dev-configure.log 2>&1 || { cat build/dev-configure.log; exit 1; }
	cmake --build --preset dev -j $(JOBS)
	ctest --preset dev

.PHONY: test-python
test-python: build model ## the Python tests
	$(BIN)/python -m pytest

.PHONY: build
build: $(VENV)/.built ## the virtual environment with kvpool in it, editable

.PHONY: model
model: build ## the demo's model, prepared once
	@$(KVPOOL) model path smollm2 >/dev/null 2>&1 || $(KVPOOL) model fetch smollm2

.PHONY: sanitize
sanitize: system-test ## the C++ tests under AddressSanitizer, UBSan and ThreadSanitizer
	cmake --preset asan && cmake --build --preset asan -j $(JOBS) && ctest --preset asan
	cmake --preset tsan && cmake --build --preset tsan -j $(JOBS) && ctest --preset tsan

.PHONY: fuzz
fuzz: ## a short run of each fuzz target
	scripts/system_packages.sh build fuzz
	cmake --preset fuzz && cmake --build --preset fuzz -j $(JOBS) && ctest --preset fuzz

.PHONY: bench
bench: build ## every benchmark; docs/benchmarks.md says what each measures
	scripts/system_packages.sh build bench
	cmake --preset release && cmake --build --preset release -j $(JOBS)
	build/release/benchmarks/cpp/allocator_benchmark
	build/release/benchmarks/cpp/formats_benchmark
	for task in benchmarks/bench_*.py; do $(BIN)/python $$task || exit 1; done

.PHONY: lint
lint: build ## formats, lint, types, layers
	@echo "clang-format: $(words $(CPP_FILES)) files"
	@$(BIN)/clang-format --dry-run --Werror $(CPP_FILES)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	scripts/check_layers.py
	scripts/check_types.sh $(BIN)

.PHONY: tidy
tidy: build system-test ## clang-tidy over the library
	cmake --preset dev >/dev/null
	git ls-files 'src/*.cpp' ':!src/mlx_ext' | xargs -P $(JOBS) -n 1 $(BIN)/clang-tidy -p build/dev --quiet
	@# The build of the package knows where MLX's headers are.
	git ls-files 'src/mlx_ext/*.cpp' | xargs -P $(JOBS) -n 1 $(BIN)/clang-tidy --quiet \
	  -p $$(dirname $$(ls -t build/cp3*/compile_commands.json | head -1))

.PHONY: format
format: $(VENV)/.deps ## rewrite the sources in the project's format
	$(BIN)/clang-format -i $(CPP_FILES)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: clean
clean: ## remove what was built; models are kept
	rm -rf build $(VENV) dist

.PHONY: system-build system-test
system-build:
	@scripts/system_packages.sh build
system-test:
	@scripts/system_packages.sh build test
	@mkdir -p build

$(VENV)/.deps: requirements-dev.txt pyproject.toml | system-build
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing the Python packages into $(VENV)"
	@$(PIP) install -r requirements-dev.txt
	@touch $@

$(VENV)/.built: $(VENV)/.deps $(SOURCES)
	@echo "Building kvpool"
	@$(PIP) install --no-build-isolation --no-deps --editable .
	@touch $@
