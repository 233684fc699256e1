# `make demo` and `make test` set everything up themselves, in .venv and build/. `make clean` removes both.
PYTHON ?= python3
EXTRAS ?= dev
BIN := .venv/bin
FOLDERS := compress cuda optim recipes src/lowcomm sync
KERNELS := $(wildcard compress/*.cpp compress/*.h cuda/*.cuh)
INSTALL_TESTS := tests/test_packaging.py tests/test_docs.py
KERNEL_TESTS = $(shell grep -l use_kernel_level tests/test_*.py)
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check -c constraints.txt
PYTEST := -m pytest -q -p no:cacheprovider -c ../pyproject.toml --rootdir ..
SANITIZE := -g -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined
UNDER_SANITIZERS := ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)"

.PHONY: demo test bench lint format reference memory composition dist test-wheel test-no-compiler sanitize \
	cuda-check cuda-mutations cuda-cost clean FORCE

demo: .venv/installed
	$(BIN)/lowcomm demo

test: .venv/installed
	$(BIN)/python -m pytest -q

bench: .venv/installed
	$(BIN)/lowcomm bench

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

reference: .venv/installed
	$(BIN)/python -m lowcomm.recipes.reference > docs/reference.md

memory: .venv/installed
	$(BIN)/python -m lowcomm.recipes.memory > build/memory.md
	mv build/memory.md docs/memory.md

composition: .venv/installed
	$(BIN)/python tests/composition.py > build/composition.md
	mv build/composition.md docs/composition.md

# The editable install is a tree of links, one for each file: it is made again when a file appears, moves or goes,
# and when a kernel must be compiled again. Edits to Python files need nothing.
.venv/installed: pyproject.toml setup.py constraints.txt $(KERNELS) .venv/files
	$(BIN)/python $(PIP_INSTALL) -e '.[$(EXTRAS)]'
	touch $@

.venv/files: FORCE | .venv/bin/python
	@find $(FOLDERS) -type f -not -name '*.pyc' -not -name '*.so' | LC_ALL=C sort > $@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

.venv/bin/python:
	$(PYTHON) -m venv .venv

FORCE:

# The rest is for those who change lowcomm, and for .ci/run.

dist: .venv/installed
	rm -rf dist
	$(BIN)/python -m build

test-wheel: dist
	rm -rf build/wheel && $(PYTHON) -m venv build/wheel
	build/wheel/bin/python $(PIP_INSTALL) "$$(ls dist/*.whl)[dev]"
	cd build && wheel/bin/python $(PYTEST) $(patsubst %,../%,$(INSTALL_TESTS) $(KERNEL_TESTS))

test-no-compiler: dist
	rm -rf build/no-compiler
	CC=false CXX=false $(BIN)/python $(PIP_INSTALL) --no-deps --target build/no-compiler dist/*.tar.gz
	test ! -e build/no-compiler/lowcomm/compress/_kernels.so
	cd build && PYTHONPATH=no-compiler ../$(BIN)/python $(PYTEST) $(patsubst %,../%,$(INSTALL_TESTS))

sanitize: .venv/installed
	rm -rf build/sanitize
	CXXFLAGS="$(SANITIZE)" LDFLAGS="-fsanitize=address,undefined" \
		$(BIN)/python $(PIP_INSTALL) --no-deps --target build/sanitize .
	cd build && $(UNDER_SANITIZERS) PYTHONPATH=sanitize ../$(BIN)/python $(PYTEST) --capture=sys $(patsubst %,../%,$(KERNEL_TESTS))

# CUDA without a GPU: compilation for every architecture, seeded bugs, instructions for a byte.
cuda-check: .venv/installed
	LOWCOMM_CUDA_ARCHITECTURES="80 90 100 120" $(BIN)/python -m pytest -q tests/test_cuda_compile.py

cuda-mutations: .venv/installed
	$(BIN)/python tests/cuda_mutations.py --tsan

cuda-cost: .venv/installed
	$(BIN)/python -m lowcomm.recipes.cuda_cost

clean:
	rm -rf .venv build dist
