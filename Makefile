# Each target does all of its own set-up. `make train` and `make test` are the two to know.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
BENCH  := $(VENV)/bench-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
READY  := $(VENV)/ready-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)

.PHONY: help train test check bench docs clean setup system

help:
	@echo 'make train   train a ResNet to its target and write a report'
	@echo 'make test    run every test'
	@echo 'make check   format, lint, types, import directions, words'
	@echo 'make bench   side by side against peers, one table, docs/performance.md; ARGS=--quick: in 10 minutes'
	@echo 'make docs    the pages, into site/'
	@echo 'make clean   what the others made, but for .venv and runs/'

train: setup
	@$(BIN)/hora train resnet $(ARGS)

# Two test processes, each with whole files: a test mostly waits for ranks. ARGS="-n 0 ..." takes one.
test: setup system
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

check: setup
	$(BIN)/ruff format --check src tests benchmarks examples tools
	$(BIN)/ruff check src tests benchmarks examples tools
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_words.py

bench: $(BENCH)
	@$(BIN)/python benchmarks/suite.py $(ARGS)

docs: setup
	$(BIN)/mkdocs build --strict --site-dir site

clean:
	rm -rf site dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests benchmarks examples tools -name __pycache__ -prune -exec rm -rf {} +

setup: $(READY)

# The stamp's name changes with the requirements, so an old environment is brought up to date.
$(READY):
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 10) <= v <= (3, 13) \
	  else "Python %d.%d does not run Hora, 3.10 to 3.13 do. Write: make PYTHON=python3.11 ..." % v)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@rm -f $(VENV)/ready-*
	@touch $@

# The peers, which nothing but the benchmarks needs.
$(BENCH): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,bench]'
	@rm -f $(VENV)/bench-*
	@touch $@

# A real browser for the report, a real mpirun, hosts made of network namespaces, and all of Fashion-MNIST. Without root the tests say what is missing.
SYSTEM := chromium fonts-dejavu-core mpich iproute2 dataset-fashion-mnist
system:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! dpkg -s $(SYSTEM) >/dev/null 2>&1; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(SYSTEM); \
	fi
