# Needs make and Python 3.10 or newer with its venv module; everything else is installed into
# .venv by the target that wants it.
#
#   make demo    train a small character model on the CPU and show what it learned
#   make test    style, types, import order and the tests
#   make coverage  the tests again, traced: at least nine lines of ten are reached
#   make compilations  tests/kernels/compiled-by-*.txt anew, after a change of kernels
#   make lint    the first three of these
#   make wheel   dist/ecornn-VERSION-py3-none-any.whl
#   make clean   remove what the tools left behind; `make distclean` removes .venv as well
#
# One environment, filled in two steps: torch is nearly all of its size, so a second one for the
# demo would double the download, and what only developers use is added when they first need it.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip -qq --disable-pip-version-check --no-input

.DEFAULT_GOAL := test
.DELETE_ON_ERROR:
.PHONY: test coverage compilations demo lint wheel clean distclean FORCE

# The steps decide, and the seed makes them repeatable; the time limit is for slow machines.
demo: $(VENV)/.runtime
	@$(BIN)/ecornn train language-model --steps 800 --minutes 1

# Two workers of one thread each: the suite is sized for two cores, and its tensors are small.
TESTS := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --maxprocesses 2 --dist worksteal

test: lint
	@$(TESTS)

# Apart from the tests: tracing takes minutes, which the suite's limit of fifteen does not have.
coverage: $(VENV)/.dev
	@$(TESTS) --cov --cov-report=

# What the compiler says of every kernel; for when their sources, their tiles or the compiler change.
compilations: $(VENV)/.dev
	@rm -f tests/kernels/compiled-by-*.txt
	@$(TESTS) --record-compilations tests/kernels/test_spills.py tests/kernels/test_compiles.py
	@for file in tests/kernels/compiled-by-*.txt; do LC_ALL=C sort -u -o $$file $$file; done

lint: $(VENV)/.dev
	@$(BIN)/python -m ruff check --quiet
	@$(BIN)/python -m ruff format --check --quiet || \
	    { echo "run: $(BIN)/ruff format"; exit 1; }
	@$(BIN)/python -m mypy --no-error-summary
	@$(BIN)/lint-imports --no-cache > $(VENV)/lint-imports.log || \
	    { cat $(VENV)/lint-imports.log; exit 1; }

wheel: $(VENV)/.dev
	@$(BIN)/python -m build --wheel --outdir dist . > $(VENV)/build.log 2>&1 || \
	    { cat $(VENV)/build.log; exit 1; }
	@ls dist/*.whl

clean:
	@rm -rf build dist .coverage .coverage.* .hypothesis .import_linter_cache .mypy_cache \
	    .pytest_cache .ruff_cache
	@find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	@rm -rf $(VENV)

# The stamp holds the path it was made for. An interpreter that no longer starts (upgraded or
# removed), a checkout that has moved or an install that was cut short makes .venv anew; a change
# of pyproject.toml or constraints.txt only installs over it.
SOUND := ok $(CURDIR)
STATE := $(shell $(BIN)/python -c "print('ok')" 2>/dev/null; cat $(VENV)/.runtime 2>/dev/null)
ifneq ($(STATE),$(SOUND))
$(VENV)/.runtime: FORCE
endif

$(VENV)/.runtime: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || \
	    { echo "ecornn needs Python 3.10 or newer, but '$(PYTHON)' is" \
	      "$$($(PYTHON) --version 2>&1 || true); name another: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	    { echo "'$(PYTHON)' cannot make virtual environments; install its venv module" \
	      "(on Debian and Ubuntu the package python3-venv)"; exit 1; }
	@echo "installing ecornn and what it needs into $(VENV) (minutes, the first time) ..."
	@test '$(STATE)' = '$(SOUND)' || $(PYTHON) -m venv --clear $(VENV)
	@$(PIP) install -c constraints.txt -e .
	@echo "$(CURDIR)" > $@

$(VENV)/.dev: $(VENV)/.runtime
	@echo "installing the developers' tools into $(VENV) ..."
	@$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@
