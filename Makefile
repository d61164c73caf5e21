# Each target does all of its own set-up: a virtual environment in .venv, weft and what the target needs inside it.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: serve chat test clean

serve: .venv/.chat
	$(BIN)/weft serve

chat: .venv/.chat
	$(BIN)/weft chat

test: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2

.venv/.chat: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

.venv/.test: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@

$(BIN)/python:
	$(PYTHON) -m venv .venv

clean:
	rm -rf .venv build src/*.egg-info
