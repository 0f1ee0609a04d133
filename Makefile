# make demo   train and test both models on a small data set made here, and show what came out
# make test   run the test suite, but for some tests that take long
# make test-all  run all of it
# make test-core  the quick tests that need torch alone, without any mm package
# make test-oldest, test-newest, test-onedl  the core's tests, and training where mm packages are, on other stacks:
#                                            noxfile.py, benchmarks/stacks.json
# make test-ray  the example on Ray Data
# make docs   the site of the documentation, into build/site; SERVE=1 serves it
# make lint   ruff and mypy
# make setup  only what the others need
# Each sets up what it needs first; a second run sets up nothing. PYTHON=python3.11 chooses the interpreter.

# An environment that is there, with a torch chosen beforehand say, is set up with its own Python.
PYTHON ?= $(or $(wildcard .venv/bin/python),python3)
SET_UP = @command -v "$(PYTHON)" >/dev/null || { echo 'set-up: no $(PYTHON) here: name a Python of 3.11 or newer, as in' \
    'make PYTHON=python3.12, or apt install python3-venv' >&2; exit 1; }; "$(PYTHON)" tools/set_up.py
SET_UP_FILES := pyproject.toml uv.lock tools/set_up.py
PY := .venv/bin/python
READY := .venv/ready
# Other Swins to compare with: torchvision, timm, transformers, mmpretrain. mmseg fails beside them.
PEERS := .venv-peers/bin/python
PEERS_READY := .venv-peers/ready
# The core alone: torch, numpy, Pillow and what runs the tests.
CORE := .venv-core/bin/python
CORE_READY := .venv-core/ready

.PHONY: setup demo test test-all test-core test-oldest test-newest test-onedl lint
setup: $(READY)

$(READY): $(SET_UP_FILES)
	$(SET_UP) .venv dev mm
	@touch $@

$(PEERS_READY): $(SET_UP_FILES)
	$(SET_UP) .venv-peers peers
	@touch $@

$(CORE_READY): $(SET_UP_FILES)
	$(SET_UP) .venv-core core
	@touch $@

demo: $(READY)
	$(PY) tools/demo.py work_dirs/demo

test: $(READY) $(PEERS_READY)
	$(PY) -m pytest -n 2 --dist worksteal -m "not long"
	$(PEERS) -m pytest -n 2 --dist worksteal tests/peers -m "not long"

test-all: $(READY) $(PEERS_READY) test-core
	$(PY) -m pytest -n 2 --dist worksteal
	$(PEERS) -m pytest -n 2 --dist worksteal tests/peers

test-core: $(CORE_READY)
	$(CORE) -m pytest -n 2 --dist worksteal -m "not slow" $(wildcard tests/test_*.py) tests/models tests/ops tests/utils tests/checkpoint tests/features

.venv-nox/bin/nox:
	"$(PYTHON)" -m venv .venv-nox
	.venv-nox/bin/pip install -q 'nox[uv]==2026.10.20'

# Each is a session of noxfile.py, which names its Python; mmcv is compiled there too.
test-oldest test-newest test-onedl: test-%: .venv-nox/bin/nox
	.venv-nox/bin/nox --session $*

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# The example on Ray Data, in an environment of its own: RAY_PYTHON=python3.12 chooses the interpreter.
RAY_PYTHON ?= python3.11
.PHONY: test-ray
.venv-ray/ready: examples/requirements-ray.txt
	$(RAY_PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m pip install -r $<
	touch $@

test-ray: .venv-ray/ready
	.venv-ray/bin/python -m pytest tests/features/test_ray.py tests/features/test_batches.py

.PHONY: docs
.venv-docs/ready: docs/requirements.txt
	"$(PYTHON)" -m venv .venv-docs
	.venv-docs/bin/python -m pip install -r $<
	touch $@

docs: .venv-docs/ready
	.venv-docs/bin/python tools/site.py $(if $(SERVE),--serve)
