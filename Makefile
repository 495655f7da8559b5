# make demo    install, then walk the whole chain on the embedded model
# make test    install, then check and test everything
# make native-test    the C++ code under the address, undefined-behaviour and thread sanitizers
VENV   ?= .venv
BIN    := $(VENV)/bin
NATIVE := $(shell find native CMakeLists.txt -type f 2>/dev/null)
JOBS ?= 2

.PHONY: demo test native-test native-asan native-tsan check format bench clean

demo: $(VENV)/run.stamp
	$(BIN)/ktplan demo

test: check
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n $(JOBS) --dist loadscope

native-test: native-asan native-tsan

native-asan native-tsan:
	cmake --preset $@
	cmake --build --preset $@ --parallel $(JOBS)
	ctest --preset $@

check: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/dev.stamp
	$(BIN)/python benchmarks/layer_forward.py

$(VENV)/run.stamp: pyproject.toml constraints.txt $(NATIVE)
	test -x $(BIN)/python || python3 -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[run]'
	touch $@

$(VENV)/dev.stamp: $(VENV)/run.stamp
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf build $(VENV)
