# Everything happens in .venv, made from PYTHON (3.11 or newer).
PYTHON ?= python3
BIN := .venv/bin
# As many processes as there are cores, each with one thread.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile

.PHONY: demo test check fuzz clean

demo: .venv/.installed
	$(BIN)/python demo_bsz.py

# Everything: `check`, and the tests that run the command line, a browser, or train something. In the order of the
# files: else those of one test come last, and one of them may take longer than all that is left to the other processes.
test: check .venv/.browser
	$(PYTEST) --no-loadscope-reorder -m slow

# Format, lint, types and the quick tests.
check: .venv/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST) -m "not slow"

# Fuzzing for so many minutes, TARGET=name for one target alone (see docs/fuzzing.md). Exit code 1 where something is
# found. Guided by coverage where atheris is installed: .venv/bin/pip install -e '.[fuzz]'
MINUTES ?= 30
fuzz: .venv/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz run --minutes $(MINUTES) $(addprefix --target ,$(TARGET))

clean:
	rm -rf .venv .fuzz .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.installed: pyproject.toml | .venv/bin/python
	$(BIN)/pip install --quiet --editable .
	touch $@

# Chromium for the tests of the page, from the system's packages where there is none.
.venv/.browser: scripts/get_browser.sh | .venv/bin/python
	scripts/get_browser.sh
	touch $@

.venv/.installed-dev: pyproject.toml | .venv/bin/python
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@ .venv/.installed
