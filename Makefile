# Each target does all of its set-up: a fresh machine needs python3 (3.11 or newer) and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_ALONE := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# `make test-newest` installs everything at its newest; `make test-oldest` installs constraints-oldest.txt, and what it
# does not name as constraints.txt has it.
# Releases of Triton beside the pinned one for which `make test-all` compiles all kernels: that of the oldest supported
# torch, and the newest.
TRITONS := 3.5.1 3.9.0

# The base class of axolotl's plugins and what it imports; what axolotl requires besides is for training on GPUs.
AXOLOTL := axolotl==0.19.0 addict==2.4.0

INSTALL_newest := --upgrade --upgrade-strategy eager --editable '.[dev]'
INSTALL_oldest := --constraint .venv-oldest/constraints.txt --editable '.[test]'

.PHONY: demo explore test test-all test-newest test-oldest check check-style check-types check-tests check-js bench lessons docs course dist clean

demo: $(VENV)/.installed  ## train an embedding layer on text that Python carries (about 90 seconds; longer on a busy machine)
	@$(BIN)/embedlayer demo --output out/demo

explore: $(VENV)/.installed  ## learn what an embedding is, in the browser, with the demo's result (trained first if need be) and words of MiniLM
	@test -f out/demo/config.json || $(BIN)/embedlayer demo --output out/demo
	@$(BIN)/embedlayer explore out/demo --words --view learn

test: $(VENV)/.installed-dev  ## run the test suite
	@$(BIN)/python -m pytest $(PYTEST_OPTIONS)

test-all: $(VENV)/.installed-dev  ## run the test suite with what it leaves out for time: long tests, all lessons, all recipes, kernels with other releases of Triton
	@$(PIP) --editable '.[recipes]'
	@$(BIN)/python -m pytest --all
	@for release in $(TRITONS); do \
		echo "Compiling all kernels with Triton $$release ..."; \
		$(PIP_ALONE) --target $(VENV)/triton-$$release "triton==$$release" && \
		PYTHONPATH=$(VENV)/triton-$$release $(BIN)/python -m pytest --all tests/kernels/gpu/test_machine_code.py || exit 1; \
	done

test-newest test-oldest: test-%: .venv-%/pyvenv.cfg  ## run the test suite with the newest, or the oldest supported, torch and transformers
	@echo "Installing into .venv-$* ..."
	@awk -F== '!/^#/ && !seen[$$1]++' constraints-oldest.txt constraints.txt > .venv-$*/constraints.txt
	@.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check $(INSTALL_$*)
	@.venv-$*/bin/python -m pip list --disable-pip-version-check | grep -E '^(torch|transformers) '
	@.venv-$*/bin/python -m pytest

check: check-style check-types check-tests check-js  ## lint, formatting, types

check-style: $(VENV)/.installed-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

check-types: $(VENV)/.installed-dev
	@$(BIN)/mypy

check-tests: $(VENV)/.installed-dev
	@$(BIN)/mypy --config-file tests/mypy.ini

check-js: node_modules/.installed  ## lint and types of the explorer's page
	@npx --no-install eslint embedlayer/explorer/page
	@npx --no-install tsc

bench: $(VENV)/.installed-dev  ## our speed beside the peers'
	@$(BIN)/python -m benchmarks

lessons: $(VENV)/.installed-docs  ## write the lessons of the course as executed notebooks with pictures into out/course
	@$(BIN)/python docs/lessons.py out/course

docs: $(VENV)/.installed-dev  ## build the site into docs/_build/html: guides, course, recipes, API reference
	@$(BIN)/python -m sphinx -W -b html docs docs/_build/html
	@echo "The site: $(CURDIR)/docs/_build/html/index.html"

course: $(VENV)/.installed-dev  ## execute every lesson and every recipe, and compare the recipes with their originals
	@$(PIP) --editable '.[recipes]'
	@$(BIN)/python -m pytest --all tests/test_course.py tests/test_site.py tests/test_training_recipes.py tests/test_recipes.py

dist: $(VENV)/.installed-dev  ## build the source distribution and the wheel into dist, and check them
	@rm -rf dist
	@$(BIN)/python -m build --no-isolation
	@$(BIN)/python -m twine check --strict dist/*

clean:  ## remove what the other targets made
	rm -rf $(VENV) $(VENV)-newest $(VENV)-oldest node_modules out dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis

%/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "embedlayer needs Python 3.11 or newer: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -m venv $*

$(VENV)/.installed: $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	@echo "Installing into $(VENV) ..."
	@$(PIP) --editable '.[fast,plots]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	@echo "Installing what the lessons need ..."
	@$(PIP) --editable '.[docs]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing what the tests need ..."
	@$(PIP) --editable '.[dev]'
	@$(PIP_ALONE) $(AXOLOTL)
	@touch $@

node_modules/.installed: package.json package-lock.json
	@command -v npm >/dev/null || { echo "make check-js needs Node.js and npm: apt-get install nodejs npm"; exit 1; }
	@echo "Installing what checks the explorer's page ..."
	@npm ci --silent
	@touch $@
