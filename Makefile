# make demo | make test: each does all the set-up it needs and is quick when run again.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: build
build: $(VENV)/.built

$(VENV)/.deps: requirements-dev.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -r requirements-dev.txt \
	  "mlx[cpu]==0.32.4" "mlx-lm==0.32.2" "rich>=13" "gguf>=0.17"
	touch $@

$(VENV)/.built: $(VENV)/.deps $(shell find src include python cmake CMakeLists.txt -type f)
	$(BIN)/pip install -q --disable-pip-version-check --no-build-isolation --no-deps -e .
	touch $@
