# Each target does all of its set-up: a fresh machine needs python3 (3.11 or newer) and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo explore test test-all check check-js bench docs course dist clean

demo: $(VENV)/.installed  ## train an embedding layer on text that Python carries (a minute or so)
	@$(BIN)/embedlayer demo --output out/demo

explore: $(VENV)/.installed  ## learn what an embedding is, in the browser, and look at the demo's result; trains it first if need be
	@test -f out/demo/config.json || $(BIN)/embedlayer demo --output out/demo
	@$(BIN)/embedlayer explore out/demo --view learn

test: $(VENV)/.installed-dev  ## run the test suite
	@$(BIN)/python -m pytest $(PYTEST_OPTIONS)

test-all: $(VENV)/.installed-dev  ## run the test suite with what it leaves out for time: long tests, all lessons, all recipes
	@$(PIP) --editable '.[recipes]'
	@$(BIN)/python -m pytest --all

check: $(VENV)/.installed-dev check-js  ## lint, formatting, types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

check-js: node_modules/.installed  ## lint and types of the explorer's page
	@npx --no-install eslint embedlayer/explorer/page
	@npx --no-install tsc

bench: $(VENV)/.installed-dev  ## our speed beside the peers'
	@$(BIN)/python -m benchmarks

docs: $(VENV)/.installed-dev  ## build the site into docs/_build/html: guides, course, recipes, API reference
	@$(BIN)/python -m sphinx -q -W -b html docs docs/_build/html

course: $(VENV)/.installed-dev  ## execute every lesson and every recipe, and compare the recipes with their originals
	@$(PIP) --editable '.[recipes]'
	@$(BIN)/python -m pytest --all tests/test_course.py tests/test_site.py tests/test_training_recipes.py tests/test_recipes.py

dist: $(VENV)/.installed-dev  ## build the source distribution and the wheel into dist, and check them
	@rm -rf dist
	@$(BIN)/python -m build --no-isolation
	@$(BIN)/python -m twine check --strict dist/*

clean:  ## remove what the other targets made
	rm -rf $(VENV) node_modules out dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "embedlayer needs Python 3.11 or newer: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	@echo "Installing into $(VENV) ..."
	@$(PIP) --editable '.[fast,plots]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing what the tests need ..."
	@$(PIP) --editable '.[dev]'
	@touch $@

node_modules/.installed: package.json package-lock.json
	@command -v npm >/dev/null || { echo "make check-js needs Node.js and npm: apt-get install nodejs npm"; exit 1; }
	@echo "Installing what checks the explorer's page ..."
	@npm ci --silent
	@touch $@
