# Everything happens in .venv; PYTHON may name another interpreter, 3.11 or later.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint clean

demo: .venv/installed
	rm -rf build/demo
	$(BIN)/qatpack demo --out build/demo

test: .venv/installed
	$(BIN)/python -m pytest -n auto --dist loadfile

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python

.venv/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "qatpack needs Python 3.11 or later: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
