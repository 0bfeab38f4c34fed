# make demo | test | lab | docs. Each sets up what it needs in .venv first; nothing else is required but Python >= 3.11.
PYTHON ?= python3
VENV   ?= .venv
# Named first and exactly, because an open range may take the largest CUDA build. For another build give pip's words for
# it: make demo TORCH="torch==2.13.0 --index-url ...". A torch that is already in .venv is kept.
TORCH  ?= torch==2.13.0
# Options of `f16lab lab`: make lab ARGS="--no-browser --port 8899".
ARGS   ?=
# The text form of one notebook: make py N=07_ops, edit $(TEXT)/07_ops.py, make nb N=07_ops.
TEXT   ?= _text
N      ?=

PY  := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --quiet --disable-pip-version-check --progress-bar off
JUPYTEXT := JUPYTER_DATA_DIR=$(VENV)/jupyter/data JUPYTER_CONFIG_DIR=$(VENV)/jupyter/config $(PY) -m jupytext --quiet
STEP := @printf '\n== %s\n'

.DEFAULT_GOAL := help
.PHONY: help demo test lab docs readme settings tidy py nb wheel clean
.SUFFIXES:

help:  ## say what there is
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# ---------------------------------------------------------------- setting up
$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "f16lab needs Python >= 3.11; $(PYTHON) is older. Name another: make PYTHON=python3.12 ..."; exit 1; }
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.core: pyproject.toml | $(PY)
	@echo "installing f16lab and what it needs into $(VENV)"
	@$(PY) -c 'import torch' 2>/dev/null || $(PIP) $(TORCH)
	@$(PIP) 'setuptools>=77' wheel && $(PIP) --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	@echo "installing what the tests need"
	@$(PIP) --no-build-isolation --editable '.[dev]'
	@touch $@

$(VENV)/.lab: $(VENV)/.core
	@echo "installing JupyterLab"
	@$(PIP) --no-build-isolation --editable '.[lab]'
	@touch $@

# Chromium comes from the system, by apt where that works; without one the browser tests are skipped, and say so.
$(VENV)/.browser: $(VENV)/.dev
	@echo "installing what the browser tests need"
	@$(PIP) --no-build-isolation --editable '.[dev,lab,browser]'
	@$(PY) .ci/browser.py
	@touch $@

# ---------------------------------------------------------------- using it
demo: $(VENV)/.core  ## train a tiny GPT in four precisions and write the report
	@$(VENV)/bin/f16lab demo

lab: $(VENV)/.lab  ## open the workbench in JupyterLab
	@$(VENV)/bin/f16lab lab $(ARGS)

docs: $(VENV)/.dev  ## run the notebooks and render them as HTML into _docs
	@$(PY) .ci/notebooks.py docs

# ---------------------------------------------------------------- proving it
test: $(VENV)/.browser  ## everything continuous integration runs
	$(STEP) "notebooks are clean"
	@$(PY) .ci/notebooks.py clean
	$(STEP) "the package is what the notebooks export"
	@$(PY) .ci/notebooks.py export
	$(STEP) "no undefined or unused names"
	@$(PY) -m ruff check --quiet --no-cache f16lab kernels tests .ci && echo "ruff: ok"
	$(STEP) "each module imports in a fresh process"
	@$(PY) .ci/notebooks.py imports
	$(STEP) "each notebook runs alone"
	@$(PY) .ci/notebooks.py run
	$(STEP) "pytest"
	@$(PY) -m pytest -q -n 2 --dist loadgroup --no-loadscope-reorder --durations=10

# ---------------------------------------------------------------- working on it
settings: $(VENV)/.dev  ## settings.ini -> pyproject.toml and the version
	@$(PY) .ci/pyproject.py

readme: $(VENV)/.dev  ## nbs/index.ipynb -> README.md
	@$(PY) .ci/readme.py

tidy: settings  ## clean the notebooks, export them, write README.md
	@$(VENV)/bin/nbdev-clean && $(VENV)/bin/nbdev-export && $(PY) .ci/readme.py
	@cp nbs/workbench.ipynb f16lab/static/workbench.ipynb

py: $(VENV)/.dev  ## a notebook as text: make py N=07_ops
	@test -n "$(N)" || { echo "which notebook? make py N=07_ops"; exit 1; }
	@mkdir -p $(TEXT) && $(JUPYTEXT) --to py:percent --output $(TEXT)/$(N).py nbs/$(N).ipynb
	@echo "edit $(TEXT)/$(N).py, then: make nb N=$(N)"

nb: $(VENV)/.dev  ## the text back into the notebook, cell ids kept: make nb N=07_ops
	@test -n "$(N)" || { echo "which notebook? make nb N=07_ops"; exit 1; }
	@$(JUPYTEXT) --to ipynb $(if $(wildcard nbs/$(N).ipynb),--update) --output nbs/$(N).ipynb $(TEXT)/$(N).py

wheel: $(VENV)/.dev  ## build dist/f16lab-*.whl
	@rm -rf build dist && $(PY) -m build --wheel --no-isolation > build.log 2>&1 || { cat build.log; exit 1; }
	@rm -rf build build.log && ls dist/*.whl

clean:  ## remove what was built; .venv and data/runs stay
	@rm -rf build dist _docs _proc $(TEXT) *.egg-info build.log .pytest_cache .ruff_cache
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
