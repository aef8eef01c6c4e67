# All set-up happens by itself: the first `make demo` or `make test` makes a virtual environment in .venv.
# `make PYTHON=python3.12 …` chooses its Python, and `make VENV=… …` another place.

.DEFAULT_GOAL := help
.PHONY: help setup lock clients demo test test-all pythons newest matrix status check lint types imports format clean
VENV := .venv
bin := $(VENV)/bin
# tests/conftest.py says how many processes; at most eight, because each holds torch and transformers in memory.
parallel := -n auto --maxprocesses 8 --dist worksteal
checks := lint types imports
export PYTHON VENV

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 16

setup:  ## make the virtual environment, or bring it up to date
	@tools/setup.sh

lock:  ## write tools/constraints.txt anew: the newest releases that the oldest Python takes
	@rm -rf .venvs/lock
	@NEWEST=yes VENV=.venvs/lock PYTHON=$(or $(PYTHON),python3.11) tools/setup.sh
	@.venvs/lock/bin/python -m tools.lock

clients: setup  ## make a second environment with lm_eval, for the long tests of serving
	@test -d .clients || $(bin)/python -m venv .clients
	@$(bin)/python -c "import torch, pathlib; print(pathlib.Path(torch.__file__).parents[1])" \
		> "$$(.clients/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/ours.pth"
	@.clients/bin/python -m pip install --quiet "lm_eval[api,hf]==0.4.13"

demo: setup  ## let the built-in models write a short story each
	@tools/demo.sh

test: setup  ## run the checks and the fast tests, before a change goes in
	@$(MAKE) --no-print-directory --jobs=4 $(checks) $(VENV)/collected
	@$(bin)/python -m pytest -q $(parallel) -m "not slow and not gpu" --durations=10 --durations-min=1

# The first collection of tests compiles all that they import, in time that one core has beside the check of types.
$(VENV)/collected: | setup
	@$(bin)/python -m pytest --quiet --collect-only >/dev/null 2>&1; touch $@

test-all: check  ## run the checks and all tests, write the pages of what they measured anew, then `pythons` and `newest`
	@rm -f .venv/records.jsonl; failed=0; \
	$(bin)/python -m pytest -q $(parallel) -m "not gpu" --hypothesis-profile=fresh --durations=20 --durations-min=1 \
		--matrix .venv/records.jsonl || failed=1; \
	$(bin)/python -m tests.matrix --records .venv/records.jsonl || failed=1; \
	$(bin)/python -m tests.compile.ahead_of_time --minutes 60 || failed=1; \
	$(bin)/python -m tools.status || failed=1; \
	tools/environments.sh pythons newest || failed=1; \
	exit $$failed

pythons:  ## run `make demo test` with every Python of pyproject.toml, each in an environment of its own
	@tools/environments.sh pythons

newest:  ## run `make demo test` with the newest release of every package, and warn if that fails
	@tools/environments.sh newest

matrix: setup  ## prove every recipe, and write docs/recipe-matrix.md from the records
	@$(bin)/python -m tests.matrix

status: setup  ## write docs/status.md from benchmarks/results
	@$(bin)/python -m tools.status

check: setup  ## check lint, format, types and the import contracts
	@$(MAKE) --no-print-directory --jobs=3 $(checks)

lint: setup  ## check lint and format
	@$(bin)/python -m ruff check --quiet . && echo "check: lint passed"
	@$(bin)/python -m ruff format --quiet --check . && echo "check: format passed"

types: setup  ## check the types of the package, the benchmarks and the tools
	@$(bin)/python -m mypy --no-error-summary && echo "check: types passed"

imports: setup  ## check the import contracts of pyproject.toml
	@$(bin)/lint-imports >$(VENV)/imports.log 2>&1 || { cat $(VENV)/imports.log; exit 1; }; echo "check: imports passed"

format: setup  ## format the code, and fix what the linter can
	@$(bin)/python -m ruff format --quiet . && $(bin)/python -m ruff check --fix --quiet .

clean:  ## remove the virtual environments, caches and builds
	@rm -rf .venv .venvs .clients build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
