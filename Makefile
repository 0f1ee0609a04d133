# make demo   train and test both models on a small generated data set, and show the results; QUICK=1 for a few steps
# make test   run the test suite without the tests marked `long`
# make test-all  run the whole test suite
# make test-core  run the quick tests that need torch but no mm package
# make test-oldest, test-newest, test-onedl  run the core's tests and training on other stacks: see noxfile.py,
#                                            benchmarks/results/stacks.json
# make test-between  compile and export with versions of torch between the oldest and the newest
# make test-compiled  run the tests that use mm packages with a compiled mmcv
# make test-processors  run the suite with fewer instructions of the processor, and with other numbers of threads
# make test-surroundings  run the suite in random order, without a home folder, in a clone with data, and the like
# make test-converters  convert exported files for ExecuTorch, LiteRT and Core ML, and compare them
# make gpu    measure and test everything that needs a GPU, in two parts of five minutes (PART=1, PART=2): benchmarks/gpu_session.py
# make test-ray  test the example for Ray Data
# make docs   build the documentation site in build/site; SERVE=1 also serves it, PUBLISH=0.3.0 commits it to gh-pages
# make lint   run ruff and mypy
# make setup  create the environment of the other targets; MMCV=compiled compiles mmcv in it, MMCV=lite undoes that
# make requirements  write requirements/*.txt from pyproject.toml; UPGRADE=numpy takes a newer version of a package
# Each target first creates the environment that it needs, if missing. PYTHON=python3.11 chooses the interpreter.

# An existing environment, for example with a torch of your choice, is completed with its own Python.
PYTHON ?= $(or $(wildcard .venv/bin/python),python3)
SET_UP = @command -v "$(PYTHON)" >/dev/null || { echo 'set-up: no $(PYTHON) here: name a Python of 3.11 or newer, as in' \
    'make PYTHON=python3.12, or apt install python3-venv' >&2; exit 1; }; "$(PYTHON)" tools/set_up.py
SET_UP_FILES := requirements/torch.txt pyproject.toml tools/set_up.py
PY := .venv/bin/python
READY := .venv/ready
# An environment keeps its mmcv, compiled or not, unless MMCV says otherwise. A new one gets mmcv-lite.
MMCV ?= kept
# Other Swins to compare with: torchvision, timm, transformers, mmpretrain. mmseg does not work in this environment.
PEERS := .venv-peers/bin/python
PEERS_READY := .venv-peers/ready
# The core only: torch, numpy, Pillow and the packages that run the tests.
CORE := .venv-core/bin/python
CORE_READY := .venv-core/ready

# More processes than the two cores of a small machine, because tests wait for the programs that they start.
PYTEST := -m pytest -n 3 --dist worksteal

.PHONY: setup requirements demo gpu test test-all test-core test-oldest test-newest test-between test-onedl test-compiled test-processors \
    test-surroundings test-converters test-ray lint FORCE
setup: $(READY)

$(READY): requirements/dev.txt requirements/mmcv.txt mmcv_lite_ops/pyproject.toml mmcv_lite_ops/mmcv/_ext.py \
    $(SET_UP_FILES) $(if $(filter-out kept,$(MMCV)),FORCE)
	$(SET_UP) .venv $< --mmcv $(MMCV)
	@touch $@

$(PEERS_READY): requirements/peers.txt $(SET_UP_FILES)
	$(SET_UP) .venv-peers $<
	@touch $@

$(CORE_READY): requirements/core.txt $(SET_UP_FILES)
	$(SET_UP) .venv-core $<
	@touch $@

# The versions that the files already name are kept. What requirements/torch.txt names is left out.
COMPILE := .venv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header \
    --no-annotate --excludes requirements/torch.txt $(addprefix --upgrade-package ,$(UPGRADE))
requirements:
	$(COMPILE) pyproject.toml --output-file requirements/core.txt --group core
	$(COMPILE) pyproject.toml --output-file requirements/dev.txt --group dev --group mm --extra mm-lite \
	    --extra features --extra zarr --extra visualize --extra export
	$(COMPILE) pyproject.toml --output-file requirements/peers.txt --group peers --extra checkpoints
	$(COMPILE) --no-deps --output-file requirements/mmcv.txt --group compiled-mmcv

demo: $(READY)
	$(PY) tools/demo.py work_dirs/demo $(if $(QUICK),--quick)

test: $(READY) $(PEERS_READY)
	$(PY) $(PYTEST) -m "not long"
	$(PEERS) $(PYTEST) tests/peers -m "not long"

test-all: $(READY) $(PEERS_READY) test-core
	$(PY) $(PYTEST)
	$(PEERS) $(PYTEST) tests/peers

test-core: $(CORE_READY)
	$(CORE) $(PYTEST) -m "not slow" $(wildcard tests/test_*.py) tests/models tests/ops tests/utils tests/checkpoint tests/images tests/features

.venv-nox/bin/nox:
	"$(PYTHON)" -m venv .venv-nox
	.venv-nox/bin/pip install -q 'nox[uv]==2026.10.20'

# Each target is a session of noxfile.py, which chooses the Python.
test-oldest test-newest test-between test-onedl test-compiled test-processors test-surroundings \
    test-converters test-ray: test-%: .venv-nox/bin/nox
	.venv-nox/bin/nox --session $*

# Uses the environment at hand, whose torch is for the GPU; PYTHON=python3 chooses another.
gpu:
	"$(PYTHON)" benchmarks/gpu_session.py $(if $(PART),--part $(PART))

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m mypy mmcv_lite_ops/mmcv/_ext.py

.PHONY: docs
.venv-docs/ready: docs/requirements.txt
	"$(PYTHON)" -m venv .venv-docs
	.venv-docs/bin/python -m pip install -r $<
	touch $@

docs: .venv-docs/ready
	.venv-docs/bin/python tools/site.py $(if $(SERVE),--serve) $(if $(PUBLISH),--publish $(PUBLISH))
