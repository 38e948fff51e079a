# make run    the environment, then the whole collection: outputs/latest/report.html
# make test   the gate: lint, the tests, and the notebooks that have changed; a quarter of an hour on two quiet cores
# make quick  the part of the tests for work in progress: a minute and a half
# make nightly  everything: all tests, all notebooks with 1 to 8 ranks, the zoo, soak, fresh environments; hours.
#             Some of it: make nightly PARTS="tests soak"
# make soak   faults at random, for five minutes
# make newest the gate's tests, the zoo and the found bugs with the newest version of everything, in an environment of its
#             own, by Python 3.12 or newer; hours
# make lab    JupyterLab on the notebooks
# make bench  the speed table
# make pages  the committed run's pages and report, in five seconds: outputs/reference/report.html
# make site   the book as a site, with a page that plans, from the committed run: outputs/site

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# Containers often set it, and then each process compiles the package anew: a third of what the tests cost.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test quick nightly soak newest lab bench pages site reference lint env clean

run: env
	$(BIN)/pardemo run

# Three files of tests at a time, on two cores, since many tests wait: 14:32 where two at a time take 16:20, of the same
# CPU seconds. In the order of tests/conftest.py, where the longest begin: pytest-xdist's own is by the number of tests.
PYTEST := $(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder

test: env lint
	$(PYTEST) -m "not nightly"

quick: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(PYTEST) -m quick

nightly: env
	$(BIN)/python .ci/nightly.py $(PARTS)

soak: env
	$(BIN)/pardemo soak

newest:
	$(PYTHON) .ci/newest.py tests

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
	$(BIN)/python .ci/reference.py

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python .ci/check_types.py

env: $(VENV)/.complete

# The stamp is written last: an installation that was interrupted is taken up again. Half of its time is Python's
# compiler, which pip lets one core do; some files are of another Python and do not compile.
$(VENV)/.complete: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11, 5))' || \
		{ echo "pardemo needs Python 3.11.5 or newer; name one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -r requirements.txt
	$(BIN)/python -m compileall -q -j 0 $(abspath $(VENV))/lib > /dev/null || true
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

clean:
	rm -rf $(VENV) outputs/latest
