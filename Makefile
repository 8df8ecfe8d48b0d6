# On a fresh machine: `make demo` and `make test` create .venv and install what they need.
PYTHON ?= python3
VENV := .venv
CONSTRAINTS := constraints.txt
GROUP := dev
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Tests start many processes: each would compile the package's and the tests' Python files anew if bytecode is not kept.
# Files are begun in the order of `tests/conftest.py`, the longest first: by itself xdist begins last those of fewest tests.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

# A part of the tests with other versions: what reads, writes and sends, and jobs of SecureBoost between processes.
LOWEST := .venv-lowest
PART := tests/cli tests/data tests/messaging tests/models tests/runs/test_processes.py tests/machine \
    tests/test_files.py tests/test_packaging.py tests/test_readme.py \
    tests/report/test_page.py

.PHONY: demo test test-rest test-all test-lowest test-newest package release test-part lint type docs snippets bench clean

# Python files are compiled on all cores: pip takes twice as long. Those of large libraries that are hardly used are left to
# whoever imports them. pip works on one core; where tests follow, kernels are compiled on another meanwhile.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/pip install --quiet --no-compile -c $(CONSTRAINTS) -e .
	$(MEANWHILE) $(BIN)/pip install --quiet --no-compile -c $(CONSTRAINTS) --group $(GROUP)
	$(BIN)/python -m compileall -q -j 0 -x '/(tests?|ray|pip|setuptools|mypy|fontTools)/' $(VENV)/lib src
	touch $@

test test-rest test-all: MEANWHILE = env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -c \
    "from treaty.runs.warm_up import compile_kernels; compile_kernels()" > /dev/null 2>&1 &

# Parties are processes: without bytecode each would compile the package's Python files anew, for half a second.
demo: $(STAMP)
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/treaty demo

# A sample of all tests, in three minutes; SEED chooses which (`tests/conftest.py`), and is printed.
SEED ?= $(shell date +%s)
test: $(STAMP)
	$(PYTEST) --sample $(SEED)

# What `make test` leaves out under the same SEED. SHARE=1 to 12: every 12th of these; LIMIT: begin none after so many seconds.
# One worker more than cores: many of these wait for time limits.
test-rest: $(STAMP)
	$(PYTEST) --numprocesses $$($(BIN)/python -c "import os; print(os.cpu_count() + 1)") --rest $(SEED) \
	    $(SHARE:%=--share %) $(LIMIT:%=--seconds %)

test-all: $(STAMP)
	$(PYTEST)

# The lowest versions that pyproject.toml allows: they have wheels for Python 3.11 and 3.12. Kernels are kept apart from the
# newest numba's, which would compile them all again.
test-lowest:
	$(MAKE) test-part VENV=$(LOWEST) CONSTRAINTS=constraints-lowest.txt GROUP=test NUMBA_CACHE_DIR=$(CURDIR)/$(LOWEST)/kernels

# The newest versions that there are, whatever constraints.txt says: before these are raised, and before a release.
test-newest:
	$(MAKE) test-part VENV=.venv-newest CONSTRAINTS=/dev/null GROUP=test NUMBA_CACHE_DIR=$(CURDIR)/.venv-newest/kernels

# The wheel and the source distribution, installed and tried without the checkout; EXTRAS=--extras: and each extra apart.
package: $(STAMP)
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python tests/try_package.py dist $(EXTRAS)

# What is published: the package, tried, with a bill of materials and checksums; KEY=FILE, of ssh-keygen: signed.
release: package
	$(BIN)/python tests/make_release.py dist $(KEY:%=--key %)

# Another Python: make test-part PYTHON=python3.13 VENV=.venv-3.13 GROUP=test
test-part: $(STAMP)
	$(PYTEST) --sample $(SEED) $(PART)

lint: $(STAMP)
	$(BIN)/ruff check src tests benchmarks docs/*.py examples
	$(BIN)/ruff format --check src tests benchmarks docs/*.py examples
	$(BIN)/lint-imports

type: $(STAMP)
	$(BIN)/mypy

# What is generated is written into the pages first; a page out of the sidebar, a dead link or anchor is an error.
docs: $(STAMP)
	$(BIN)/python docs/prose.py --check
	$(BIN)/python docs/options.py > docs/options.md
	$(BIN)/python docs/disclosures.py
	$(BIN)/python docs/attack_scores.py
	$(BIN)/python docs/pictures.py
	$(BIN)/sphinx-build -q -W --keep-going -c docs . site
	@echo "site/index.html"

# Runs all examples, and writes what they print into the pages that show them.
snippets: $(STAMP)
	$(BIN)/python docs/snippets.py

# What was published (what it prints is in benchmarks/logs), then what else is measured. Hours.
MEASURED := pooled_speed prediction_speed shap_speed alignment_speed cipher_speed comparison_speed lattice_speed \
    lattice_skew secure_routing secureboost_speed secureboost_memory secureboost_limits secureboost_attacks \
    secureboost_exact_sums exact_sums_grid gradient_audit secpred_queries histogram_inversion smm_attacks \
    fedxgboost_ldp logistic_calibration logistic_attacks large_tables estimates faults mutations
bench: $(STAMP)
	$(BIN)/python benchmarks/bench.py run all --again
	for each in $(MEASURED); do $(BIN)/python benchmarks/$$each.py || exit 1; done
	$(BIN)/python benchmarks/federboost_horizontal.py --noise --link --namespaces
	$(BIN)/python benchmarks/fedxgb.py --tree
	$(BIN)/python benchmarks/fedxgb_churn.py --tolerance --collusion --training

clean:
	rm -rf .venv .venv-*
