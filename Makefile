# Every command a person or the CI runs. Each target sets up what it needs in .venv by itself.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The versions this commit was tested with; `make CONSTRAINTS= run` takes the newest that pyproject.toml allows.
CONSTRAINTS ?= -c constraints.txt
OUTPUT ?= output/extrapolate

.PHONY: run test attack mutants check core-test fix bench board gpu sanitize neon first-hour wheels docs clean

run: $(VENV)/.run  ## train short, test long on this machine: a report in a few minutes
	$(BIN)/linbias extrapolate --output $(OUTPUT)

# Each worker begins with half of the files, so that what tests share is made once, and takes over from the other at the end.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

test: $(VENV)/.dev  ## the tests, two at a time, in 3 to 5 minutes; `make check` adds those that start processes and those that ask more
	$(PYTEST) -m 'not processes and not thorough'

check: $(VENV)/.dev  ## what CI runs: format, lint, types, the core's own test, every test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run --Werror $(CXX_SOURCES)
	$(BIN)/mypy
	$(MAKE) core-test
	$(PYTEST)

core-test: $(VENV)/.dev  ## the C++ core's own test, without Python: every target, a model of the matrix unit too, and no warnings
	$(BIN)/cmake -S . -B build/test -DLINBIAS_TEST=ON -DLINBIAS_WERROR=ON -DLINBIAS_EMULATE_AMX=ON
	$(BIN)/cmake --build build/test --parallel 2
	build/test/attention_test

mutants: $(VENV)/.dev  ## break the source on purpose, in a copy, and see which test notices: docs/mutants.md
	$(BIN)/python tests/mutants.py

fix: $(VENV)/.dev  ## format and mend what lint can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES)

bench: $(VENV)/.run  ## measure attention and its peers on this CPU; records go to records/
	$(BIN)/python benchmarks/bench_attention.py
	$(BIN)/python benchmarks/bench_decode.py
	$(BIN)/python benchmarks/bench_memory.py --implementations cpu blocked

board: $(VENV)/.dev  ## engines that people deploy on CPUs, side by side on ALiBi models: docs/results/board.md; goes on where it was
	$(BIN)/python benchmarks/board/board.py
	$(BIN)/python benchmarks/board/report.py

gpu: $(VENV)/.dev  ## on a CUDA device: the contract of the Triton kernels, and what they take beside peers, as one page in 9 minutes
	$(BIN)/python benchmarks/bench_gpu.py

# Two widths of vectors, and the matrix unit's code as plain C++, which the sanitizers see through; races do not depend on the width.
SANITIZED_address,undefined := avx2;avx512_bf16
SANITIZED_thread := avx2
sanitize: $(VENV)/.dev  ## the C++ core's own test under the address, undefined-behaviour and thread sanitizers
	$(MAKE) --jobs 2 sanitize-address,undefined sanitize-thread

sanitize-%:
	$(BIN)/cmake -S . -B build/$* -DLINBIAS_TEST=ON -DLINBIAS_EMULATE_AMX=ON '-DLINBIAS_TARGETS=$(SANITIZED_$*)' \
	  -DLINBIAS_SANITIZE=$* -DCMAKE_CXX_FLAGS_RELEASE=-O1
	$(BIN)/cmake --build build/$*
	build/$*/attention_test

attack: $(VENV)/.dev  ## search for a broken certificate and for wrong results, in 20 minutes; a line of records/attack.jsonl
	OMP_NUM_THREADS=1 $(BIN)/python runs/attack.py

docs: $(VENV)/.dev  ## the documentation site, in build/site: static files for any host; every warning is an error
	rm -rf build/site
	$(BIN)/python -m sphinx -W --keep-going -q -E -d build/doctrees docs build/site
	@echo "build/site/index.html"

first-hour:  ## what a new user meets: fresh environments with no extra, torch, jax and lm (minutes, and 6 GB for a while)
	$(PYTHON) tests/first_hour.py

neon:  ## compile the core and its test for 64-bit Arm, and run it under qemu-user where that is installed
	test -x build/zig/bin/python || $(PYTHON) -m venv build/zig
	build/zig/bin/python -m pip install --quiet ziglang
	build/zig/bin/python -m ziglang c++ -target aarch64-linux-musl -static -std=c++20 -O3 -Wall -Wextra -Werror \
	  -Wno-psabi -Icsrc/include -Icsrc -DLINBIAS_TARGET_baseline csrc/boxes.cpp csrc/dispatch.cpp \
	  csrc/parallel.cpp csrc/target_baseline.cpp csrc/*_test.cpp -o build/attention_test_neon
	@if command -v qemu-aarch64 > /dev/null; then qemu-aarch64 build/attention_test_neon; \
	else echo "build/attention_test_neon is compiled but not run: there is no qemu-aarch64 (Debian: qemu-user)"; fi

wheels:  ## build the sdist and the wheels into dist/, and check them on every Python that is here (CONTRIBUTING.md: Release)
	$(PYTHON) release/wheels.py

clean:
	rm -rf $(VENV) build dist output

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || \
	  { echo "linbias needs Python 3.11 to 3.13, and $(PYTHON) is $$($(PYTHON) -V 2>&1): make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

CXX_SOURCES := $(wildcard csrc/*.h csrc/*.cpp csrc/include/linbias/* bindings/*)
SOURCES := CMakeLists.txt $(CXX_SOURCES)

$(VENV)/.run: $(VENV)/bin/python pyproject.toml constraints.txt $(SOURCES)
	@echo "installing linbias[lm] into $(VENV), which compiles its core: some minutes, once"
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) --editable '.[lm]'
	touch $@

# labml-nn asks for torchvision and torchtext, which its attention does not use and which must match torch's
# build: installed without its dependencies, it needs only what is here already.
$(VENV)/.dev: $(VENV)/.run
	@echo "installing what tests and documentation need besides, linbias[dev], into $(VENV): some minutes, once"
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) 'linbias[dev]'
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) --no-deps labml-nn labml
	touch $@
