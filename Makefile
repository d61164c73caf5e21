# Each target does all of its own set-up: a virtual environment in .venv, weft and what the target needs inside it.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: serve chat test test-long clients clean

serve: .venv/.chat
	$(BIN)/weft serve

chat: .venv/.chat
	$(BIN)/weft chat

test: .venv/.test
	@echo "ruff and mypy: about 1 minute; then all tests: 10 to 30 minutes on two cores"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2

# Every test at full strength: all examples of the property tests, and the tests marked `long`.
test-long: .venv/.test
	$(BIN)/pytest -n 2 -m "not clients" --hypothesis-profile=long

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
	@echo "Installing weft and its libraries into .venv, once: PyTorch is most of it (on Linux with CUDA's libraries, about 3 GB"
	@echo "to download; elsewhere 0.3 GB). 1 to 10 minutes, by your connection. Nothing is installed outside of .venv."
	$(BIN)/python -m pip install --editable .
	touch $@

.venv/.test: pyproject.toml | $(BIN)/python
	@echo "Installing weft, its libraries and those of its tests (pytest, Transformers, matplotlib, ruff, mypy, ...) into .venv,"
	@echo "once: about 4 GB to download on Linux, 1 GB elsewhere. 2 to 15 minutes, by your connection."
	$(BIN)/python -m pip install --editable '.[test]'
	touch $@

$(BIN)/python:
	@echo "Making a virtual environment in .venv: a few seconds"
	$(PYTHON) -m venv .venv

clean:
	rm -rf .venv .venv-clients tests/clients/node_modules build src/*.egg-info
