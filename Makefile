# Each target does all of its own set-up: a virtual environment in .venv, weft and what the target needs inside it.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: serve chat test clients clean

serve: .venv/.chat
	$(BIN)/weft serve

chat: .venv/.chat
	$(BIN)/weft chat

test: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2

# Real clients against a real server, in an environment of their own. Needs Node.js 20 or newer for two of them.
clients: .venv/.test .venv-clients/.installed
	$(BIN)/pytest -m clients tests/clients

.venv-clients/.installed: tests/clients/requirements.txt tests/clients/package.json
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install --quiet 'torch>=2.11,<2.14'
	.venv-clients/bin/python -m pip install --quiet --requirement tests/clients/requirements.txt
	npm install --prefix tests/clients --no-audit --no-fund
	touch $@

.venv/.chat: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

.venv/.test: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@

$(BIN)/python:
	$(PYTHON) -m venv .venv

clean:
	rm -rf .venv .venv-clients tests/clients/node_modules build src/*.egg-info
