# make demo   train and test both models on a small data set made here, and show what came out
# make test   run the whole test suite
# make lint   ruff and mypy
# Each sets up what it needs first; a second run sets up nothing. PYTHON=python3.11 chooses the interpreter.

PYTHON ?= python3
PY := .venv/bin/python
READY := .venv/ready

.PHONY: setup demo test lint
setup: $(READY)

$(READY): requirements/torch.txt requirements/mm.txt requirements/dev.txt pyproject.toml tools/setup.sh
	tools/setup.sh "$(PYTHON)" .venv
	touch $@

demo: $(READY)
	$(PY) tools/demo.py work_dirs/demo

test: $(READY)
	$(PY) -m pytest -n 2

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
