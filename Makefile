# make run    the environment, then the whole collection: outputs/latest/report.html
# make test   the tests, which run the collection too
# make quick  the part of the tests for work in progress: under three minutes on two quiet cores
# make lab    JupyterLab on the notebooks
# make bench  the speed table
# make pages  the committed run's pages and report, in five seconds: outputs/reference/report.html
# make site   the book as a site, with a page that plans, from the committed run: outputs/site

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: run test quick lab bench pages site reference lint env clean

run: env
	$(BIN)/pardemo run

# Two files of tests at a time, on two cores; with three they took a tenth less, and some failed that wait for a core.
# In the order of tests/conftest.py, where the longest begin: pytest-xdist's own is by the number of tests.
test: env lint
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

quick: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m quick

lab: env
	$(BIN)/jupyter lab --notebook-dir notebooks $(if $(filter 0,$(shell id -u)),--allow-root)

bench: env
	$(BIN)/pardemo bench

pages: env
	$(BIN)/pardemo report outputs/reference

site: env
	$(BIN)/pardemo site

# One run to commit: executed notebooks, figures, claims, the speed table, the README's table. Pages and report, which it
# builds as well, stay out of git: make pages builds them again.
reference: env
	$(BIN)/python -m pardemo.book.run.reference

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python .ci/check_types.py

env: $(VENV)/.complete

# The stamp is written last: an installation that was interrupted is taken up again.
$(VENV)/.complete: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11, 5))' || \
		{ echo "pardemo needs Python 3.11.5 or newer; name one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

clean:
	rm -rf $(VENV) outputs/latest
