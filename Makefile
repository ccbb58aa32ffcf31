# The two commands of the README:
#   make book   environment, default model and texts, stale notebooks, HTML: all that a reader needs
#   make test   all that CI checks
# For a class: make teach (student's and instructor's copies of the notebooks, and slides)
# Single steps: make environment | fetch | notebooks | studies | runs | html | slides | lint | unit | nbval | papermill | browser |
#   environment.yml | clean
# Variables: PYTHON (which python3 makes .venv), PIP_ARGS (more arguments for pip), PYTEST_ARGS, GEOMLIB_CACHE.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:
.DEFAULT_GOAL := book
.PHONY: book test environment fetch notebooks html strict-html lint unit nbval papermill papermill-model papermill-texts browser teach slides studies runs clean FORCE

PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
HTML := _build/html
export CHROMIUM

LIBRARY := $(wildcard geomlib/*.py geomlib/*/*.py)
NOTEBOOKS := $(sort $(wildcard notebooks/*.ipynb))
PAGES := _config.yml _toc.yml CITATION.cff $(shell find book -type f -not -path '*/__pycache__/*')

# Never more threads than cores, also where the caller's environment asks for more: each extra one only waits.
CORES := $(shell env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
override OMP_NUM_THREADS := $(shell n=$$(printf %d "$${OMP_NUM_THREADS:-$(CORES)}" 2>/dev/null || echo 0); \
	if [ "$$n" -lt 1 ] || [ "$$n" -gt $(CORES) ]; then n=$(CORES); fi; echo "$$n")
export OMP_NUM_THREADS
export MKL_NUM_THREADS := $(OMP_NUM_THREADS)
export TOKENIZERS_PARALLELISM := false
# Before a command of which several run side by side.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 NUMBA_NUM_THREADS=1
# A pip or a notebook that looks outside .venv finds other versions than the lock's.
export PYTHONNOUSERSITE := 1
unexport PYTHONPATH
unexport PYTHONHOME

# --- the book ---------------------------------------------------------------------------------------------------------

# The notebooks may be rewritten on the way, so the HTML is judged by a second make, which looks at the files anew.
book: .make/notebooks
	@$(MAKE) --no-print-directory html
	@echo "The book: $(HTML)/index.html"

environment: .make/environment
fetch: .make/fetch
notebooks: .make/notebooks
html: .make/html

# A .venv that works is kept: to change its Python, remove it first.
.make/environment: requirements.lock pyproject.toml $(if $(wildcard $(BIN)/python),,FORCE)
	@mkdir -p .make
	@$(new_venv)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) -r requirements.lock
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation -e .
	@touch $@

# Debian's and Ubuntu's python3 come without ensurepip, so `python3 -m venv` fails there until python3-venv is
# installed. The three ways round that, which change nothing outside this folder: the pip of that Python, the wheel in
# Debian's python3-pip-whl, unpacked here; and a sentence.
define new_venv
supported='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))'; \
if $(BIN)/python -c "$$supported" 2>/dev/null && $(BIN)/python -m pip --version >/dev/null 2>&1; then exit 0; fi; \
$(PYTHON) -c "$$supported" 2>/dev/null || { \
  found=$$($(PYTHON) --version 2>/dev/null || echo "not there"); \
  echo "$(PYTHON) is $$found, and geomlib runs on Python 3.11, 3.12 or 3.13: name one of these, as in" \
    "'make book PYTHON=python3.12'." >&2; exit 1; }; \
echo "Making $(VENV) with $$($(PYTHON) --version)."; \
if $(PYTHON) -c 'import ensurepip' 2>/dev/null; then $(PYTHON) -m venv --clear $(VENV); exit 0; fi; \
$(PYTHON) -m venv --clear --without-pip $(VENV); \
if $(PYTHON) -m pip --python $(BIN)/python install --quiet pip 2>/dev/null; then exit 0; fi; \
rm -rf .make/pip; mkdir -p .make/pip; cd .make/pip; \
{ apt-get download python3-pip-whl || { apt-get update && apt-get download python3-pip-whl; }; } >/dev/null 2>&1 \
  && for deb in *.deb; do dpkg-deb -x "$$deb" .; done || true; \
cd ../..; \
wheel=$$(find .make/pip -name 'pip-*.whl' | head -n 1); \
if [ -n "$$wheel" ] && $(BIN)/python "$$wheel/pip" install --quiet --no-index "$$wheel"; then exit 0; fi; \
rm -rf $(VENV); \
echo "$(PYTHON) cannot make a virtual environment, since it lacks ensurepip: run 'sudo apt install python3-venv' and" \
  "then make again." >&2; exit 1
endef

# Asked again after each change of the library: what is already in the cache costs a check only.
.make/fetch: .make/environment $(LIBRARY)
	$(BIN)/geomlib fetch
	@touch $@

# Committed notebooks whose outputs are older than their inputs are executed again, in place.
.make/notebooks: .make/fetch $(LIBRARY) $(NOTEBOOKS)
	$(BIN)/geomlib notebooks
	@touch $@

# Always a whole build: an incremental one is silent about the warnings of the pages that it skips, and so passes a
# book that a fresh clone fails on.
# The reference is made from the library's docstrings.
.make/html: .make/environment $(PAGES) $(NOTEBOOKS) $(LIBRARY) $(if $(wildcard $(HTML)/index.html),,FORCE)
	rm -rf $(HTML) _build/.doctrees _build/.jupyter_cache
	$(BIN)/jupyter-book build -W -n --keep-going .
	@$(BIN)/python -c "$$PAGES_EXIST"
	@touch $@

# jupyter-book can finish with exit code 0 and no page written, so each page of the contents is looked for.
define PAGES_EXIST
import pathlib, sys, yaml
def files(node):
    if isinstance(node, dict):
        yield from (node[key] for key in ("root", "file") if key in node)
        for value in node.values():
            yield from files(value)
    elif isinstance(node, list):
        for item in node:
            yield from files(item)
html = pathlib.Path("$(HTML)")
pages = ["index", *files(yaml.safe_load(open("_toc.yml")))]
missing = [page for page in pages if not (html / page).with_suffix(".html").is_file()]
sys.exit("The build wrote no HTML for: " + ", ".join(missing) if missing else 0)
endef
export PAGES_EXIST

FORCE:

# --- what CI checks ---------------------------------------------------------------------------------------------------

# The long run has a core for itself, the rest of the list the others.
test: lint unit nbval
	@$(MAKE) --no-print-directory papermill-model & first=$$!; second=0; \
	{ $(MAKE) --no-print-directory papermill-texts strict-html && $(MAKE) --no-print-directory browser; } || second=$$?; \
	wait $$first && exit $$second
	@echo "All checks passed."

lint: .make/environment
	$(BIN)/ruff check .

# The slow tests too; a process a core, each with one thread.
unit: .make/fetch
	$(ONE_THREAD) $(BIN)/python -m pytest -n $(CORES) --dist worksteal $(PYTEST_ARGS)

# Every committed output against a fresh kernel and studies measured anew; a process a core, each a notebook at a time with one
# thread. The one place that names nbval's options.
nbval: .make/fetch
	rm -rf .make/results
	GEOMLIB_RESULTS=$(CURDIR)/.make/results $(ONE_THREAD) $(BIN)/python -m pytest -n $(CORES) --dist loadfile --nbval --nbval-current-env \
	  --nbval-sanitize-with tests/nbval_sanitize.cfg --nbval-cell-timeout=900 $(NOTEBOOKS)

# Every notebook again by the run command: on another model, and on other texts where that does not take hundreds of passes.
papermill: papermill-model papermill-texts

papermill-model: .make/fetch
	rm -rf runs/check-gemma
	$(ONE_THREAD) $(BIN)/geomlib run --model gemma3-270m --profile quick --set layer=9 --set head=2 --set calibrate=1 --set "retentions=[0.8, 0.4]" --out runs/check-gemma

papermill-texts: .make/fetch
	rm -rf runs/check-texts
	$(ONE_THREAD) $(BIN)/geomlib run --profile quick --chapters 01,02,03,04 --corpus vital-articles-fr --corpus vital-articles-es \
	  --set "sentence=La capitale de l'Italie est Rome, et la capitale de la France est" --out runs/check-texts

strict-html:
	@rm -f .make/html
	@$(MAKE) --no-print-directory html

# Pages and slides in a browser that has no network.
browser: .make/html
	@command -v "$${CHROMIUM:-chromium}" >/dev/null || { echo "There is no chromium: run 'sudo apt install chromium', or name another browser of its" \
	  "kind, as in 'make browser CHROMIUM=google-chrome'." >&2; exit 1; }
	$(BIN)/python -m pytest -m browser $(PYTEST_ARGS)

# --- for a class ------------------------------------------------------------------------------------------------------

# Two copies of the notebooks, without and with solutions, and the slides of the seminar. Needs no model.
teach: slides
	$(BIN)/geomlib teach --out teach/student
	$(BIN)/geomlib teach --solutions --out teach/instructor
	@echo "For students: teach/student. For you: teach/instructor and teach/slides/index.html."

# Figures and prints come from the notebooks as they are; always a whole build, since it takes seconds.
slides: .make/environment
	rm -rf teach/slides .make/slides
	$(BIN)/sphinx-build -W --keep-going -q -b revealjs -d .make/slides book/slides teach/slides

# --- upkeep -----------------------------------------------------------------------------------------------------------

# The tables of the sparsification chapter that come with the book, measured anew: hundreds of passes per document.
studies: .make/fetch
	rm -rf book/studies
	GEOMLIB_RESULTS=$(CURDIR)/book/studies $(BIN)/geomlib notebooks 05

# The runs behind the scorecard and the comparison, measured anew; what the book keeps of them is their results.
RUNS := smollm2-135m gemma3-270m
runs: .make/fetch
	set -e; for model in $(RUNS); do \
	  $(BIN)/geomlib run --model $$model --chapters 01,02,03,04,05 --out runs/book-$$model; \
	  mkdir -p book/runs/$$model; cp runs/book-$$model/run.json runs/book-$$model/scorecard.json runs/book-$$model/measures.csv book/runs/$$model; \
	done

# The lock in conda's form.
environment.yml: requirements.lock
	@{ echo "# Made from requirements.lock by 'make environment.yml': the same versions for conda. Then: pip install --no-deps -e ."; \
	  echo "name: geomlib"; echo "channels:"; echo "  - conda-forge"; echo "dependencies:"; echo "  - python=3.11"; \
	  echo "  - pip"; echo "  - pip:"; sed -e '/^#/d' -e '/^$$/d' -e "s/'/''/g" -e "s/.*/      - '&'/" requirements.lock; } > $@

clean:
	rm -rf _build .make runs/check-* runs/studies
