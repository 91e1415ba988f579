# `make demo` or `make test` is all a fresh machine needs; both set up first.
PYTHON ?= python3.11
BIN := .venv/bin

.PHONY: install demo test check format clean

install: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	@echo "Setting up .venv (a few minutes the first time) ..."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: install
	$(BIN)/kvrs demo

test: install
	$(BIN)/python -m pytest

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_tidy.py

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv out
