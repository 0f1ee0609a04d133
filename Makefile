# make demo   train and test both models on a small data set made here, and show what came out
# make test   run the test suite, but for some tests that take long
# make test-all  run all of it
# make test-core  the tests that need torch alone, without any mm package
# make test-oldest, test-newest, test-onedl  the core's tests, and training where mm packages are, on other stacks:
#                                            benchmarks/stacks.json
# make lint   ruff and mypy
# make setup  only what the others need
# Each sets up what it needs first; a second run sets up nothing. PYTHON=python3.11 chooses the interpreter.

# An environment that is there, with a torch chosen beforehand say, is set up with its own Python.
PYTHON ?= $(or $(wildcard .venv/bin/python),python3)
SET_UP = @command -v "$(PYTHON)" >/dev/null || { echo 'set-up: no $(PYTHON) here: name a Python of 3.11 or newer, as in' \
    'make PYTHON=python3.12, or apt install python3-venv' >&2; exit 1; }; "$(PYTHON)" tools/set_up
SET_UP_FILES := requirements/torch.txt requirements/core.txt pyproject.toml $(wildcard tools/set_up/*.py)
PY := .venv/bin/python
READY := .venv/ready
# Other people's Swins, as oracles: torchvision, timm, transformers, mmpretrain. They do not get on with mmseg.
PEERS := .venv-peers/bin/python
PEERS_READY := .venv-peers/ready
# The core alone: torch, numpy, Pillow and what runs the tests.
CORE := .venv-core/bin/python
CORE_READY := .venv-core/ready
# Other stacks, which nothing else uses. mmcv is compiled there too: as long as for the main one.
OLDEST_PYTHON ?= python3.10
NEWEST_PYTHON ?= python3.13
ONEDL_PYTHON ?= python3.12

.PHONY: setup demo test test-all test-core test-oldest test-newest test-onedl lint
setup: $(READY)

$(READY): $(SET_UP_FILES) requirements/mm.txt requirements/dev.txt
	$(SET_UP) main .venv
	touch $@

$(PEERS_READY): $(SET_UP_FILES) requirements/peers.txt requirements/peers-no-deps.txt
	$(SET_UP) peers .venv-peers
	touch $@

$(CORE_READY): $(SET_UP_FILES)
	$(SET_UP) core .venv-core
	touch $@

demo: $(READY)
	$(PY) tools/demo.py work_dirs/demo

test: $(READY) $(PEERS_READY)
	$(PY) -m pytest -n 2 --dist worksteal -m "not long"
	$(PEERS) -m pytest tests/peers -m "not long"

test-all: $(READY) $(PEERS_READY) test-core
	$(PY) -m pytest -n 2 --dist worksteal
	$(PEERS) -m pytest tests/peers

test-core: $(CORE_READY)
	$(CORE) -m pytest $(filter-out tests/test_wheel.py,$(wildcard tests/test_*.py)) tests/ops tests/checkpoint tests/features

.venv-oldest/ready: STACK_PYTHON = $(OLDEST_PYTHON)
.venv-onedl/ready: STACK_PYTHON = $(ONEDL_PYTHON)
.venv-oldest/ready .venv-onedl/ready: .venv-%/ready: requirements/%.txt
	$(STACK_PYTHON) -m venv .venv-$*
	.venv-$*/bin/pip install $$(grep -E '^(torch|numpy|setuptools|wheel|ninja|psutil)==' $<)
	.venv-$*/bin/pip install --no-build-isolation $$(grep -E '^(onedl-)?mmcv==' $<)
	.venv-$*/bin/pip install -r $<
	touch $@

.venv-newest/ready: requirements/newest.txt
	$(NEWEST_PYTHON) -m venv .venv-newest
	.venv-newest/bin/pip install -r $<
	touch $@

test-oldest test-newest test-onedl: test-%: .venv-%/ready
	.venv-$*/bin/python benchmarks/stacks.py $*

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
