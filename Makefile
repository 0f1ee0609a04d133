# make demo   train and test both models on a small data set made here, and show what came out
# make test   run the whole test suite
# make lint   ruff and mypy
# make setup  only what the others need
# Each sets up what it needs first; a second run sets up nothing. PYTHON=python3.11 chooses the interpreter.

# An environment that is there, with a torch chosen beforehand say, is set up with its own Python.
PYTHON ?= $(or $(wildcard .venv/bin/python),python3)
SET_UP = "$(PYTHON)" tools/set_up
PY := .venv/bin/python
READY := .venv/ready
# Other people's Swins, as oracles: torchvision, timm, transformers, mmpretrain. They do not get on with mmseg.
PEERS := .venv-peers/bin/python
PEERS_READY := .venv-peers/ready

.PHONY: setup demo test lint
setup: $(READY)

$(READY): requirements/torch.txt requirements/mm.txt requirements/dev.txt pyproject.toml $(wildcard tools/set_up/*.py)
	$(SET_UP) main .venv
	touch $@

$(PEERS_READY): requirements/torch.txt requirements/peers.txt requirements/peers-no-deps.txt pyproject.toml \
    $(wildcard tools/set_up/*.py)
	$(SET_UP) peers .venv-peers
	touch $@

demo: $(READY)
	$(PY) tools/demo.py work_dirs/demo

test: $(READY) $(PEERS_READY)
	$(PY) -m pytest -n 2
	$(PEERS) -m pytest tests/peers

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
