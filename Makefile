# Every command a person or the CI runs. Each target sets up what it needs in .venv by itself.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The versions this commit was tested with; `make CONSTRAINTS= run` takes the newest that pyproject.toml allows.
CONSTRAINTS ?= -c constraints.txt
OUTPUT ?= output/extrapolate

.PHONY: run test attack mutants check proof core-test fix bench board gpu sanitize neon macos first-hour serve wheels debian docs clean

run: $(VENV)/.run  ## train short, test long on this machine: a report in a few minutes
	$(BIN)/linbias extrapolate --output $(OUTPUT)

# Each worker begins with half of the files, so that what tests share is made once, and takes over from the other at the end.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

test: $(VENV)/.dev  ## the tests, two at a time, in 5 to 6 minutes with AVX2; `make check` adds those that start processes or a browser and those that ask more
	$(PYTEST) -m 'not processes and not thorough'

# Those that look at the processor, on this one as if it had less: LINBIAS_MAX_CPU_TARGET=avx2 make test runs all so.
LESS := $(PYTEST) -m 'not processes and not thorough' tests/core/test_machine.py tests/core/test_cpu.py tests/torch/test_decoding.py

check: $(VENV)/.dev  ## what CI runs: format, lint, types, the proof, the core's own test, every test, some as an older processor runs them
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run --Werror $(CXX_SOURCES)
	$(BIN)/mypy
	$(PYTHON) proof/prove.py --if-installed
	$(MAKE) core-test
	$(PYTEST)
	LINBIAS_MAX_CPU_TARGET=avx2 $(LESS)
	LINBIAS_MAX_CPU_TARGET=baseline $(LESS)

proof:  ## check the proof of docs/math.md with Coq, and print the axioms that it rests on (Debian: coq libcoq-flocq)
	$(PYTHON) proof/prove.py

core-test: $(VENV)/.dev  ## the C++ core's own test, without Python: every target, a model of the matrix unit too, and no warnings
	$(BIN)/cmake -S . -B build/test -DLINBIAS_TEST=ON -DLINBIAS_WERROR=ON -DLINBIAS_EMULATE_AMX=ON
	$(BIN)/cmake --build build/test --parallel 2
	build/test/attention_test

mutants: $(VENV)/.dev  ## break the source on purpose, in a copy, and see which test notices
	$(BIN)/python evidence/mutants/mutants.py

fix: $(VENV)/.dev  ## format and mend what lint can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES)

bench: $(VENV)/.run  ## measure attention and its peers on this CPU; records go to evidence/records/
	$(BIN)/python evidence/benchmarks/bench_attention.py

board: $(VENV)/.dev  ## engines that people deploy on CPUs, side by side on ALiBi models: docs/results/board.md; goes on where it was
	$(BIN)/python evidence/benchmarks/board/board.py
	$(BIN)/python evidence/benchmarks/board/report.py

gpu: $(VENV)/.dev  ## on a CUDA device: the contract of the Triton kernels, and what they take beside peers, as one page in 10 minutes
	$(BIN)/python evidence/benchmarks/bench_gpu.py

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

attack: $(VENV)/.dev  ## search for a broken certificate and for wrong results, in 20 minutes; a line of evidence/records/attack.jsonl
	OMP_NUM_THREADS=1 $(BIN)/python evidence/runs/attack.py

docs: $(VENV)/.dev  ## the documentation site, in build/site: static files for any host; every warning is an error
	rm -rf build/site
	$(BIN)/python -m sphinx -W --keep-going -q -E -d build/doctrees docs build/site
	@echo "build/site/index.html"

first-hour:  ## what a new user meets: fresh environments with no extra, torch, jax and lm (minutes, and 6 GB for a while)
	$(PYTHON) tests/project/first_hour.py

# Zig's clang compiles for systems that are not here. Where the language leaves a choice, it takes what CMakeLists.txt takes.
ZIG := build/zig/bin/python -m ziglang c++ -std=c++20 -O3 -fno-math-errno -Wall -Wextra -Werror -Wno-psabi -Icsrc/include -Icsrc
BASELINE_CORE := -DLINBIAS_TARGET_baseline csrc/boxes.cpp csrc/dispatch.cpp csrc/parallel.cpp csrc/target_baseline.cpp

neon: build/zig/bin/python  ## compile the core and its test for 64-bit Arm, and run it under qemu-user where that is installed
	$(ZIG) -target aarch64-linux-musl -static $(BASELINE_CORE) csrc/test/*.cpp -o build/attention_test_neon
	@if command -v qemu-aarch64 > /dev/null; then qemu-aarch64 build/attention_test_neon; \
	else echo "build/attention_test_neon is compiled but not run: there is no qemu-aarch64 (Debian: qemu-user)"; fi

macos: build/zig/bin/python  ## compile the core, its test and the modules for Python for macOS on Arm, where they are not run
	$(ZIG) -target aarch64-macos $(BASELINE_CORE) csrc/test/*.cpp -o build/attention_test_macos
	headers=$$($< -c 'import sysconfig; print(sysconfig.get_path("include"))') && \
	nanobind=$$($< -c 'import nanobind; print(nanobind.source_dir() + "/..")') && \
	$(ZIG) -target aarch64-macos -shared -undefined dynamic_lookup -fvisibility=hidden -fno-strict-aliasing \
	  -isystem $$headers -isystem $$nanobind/include -isystem $$nanobind/ext/robin_map/include \
	  $$nanobind/src/nb_combined.cpp bindings/*.cpp -o build/linbias_macos.so

build/zig/bin/python:
	$(PYTHON) -m venv build/zig
	$@ -m pip install --quiet ziglang nanobind

# Its Transformers is older than ours, so it has an environment of its own. Pictures and sound, which text does without, must
# match torch's build, or Transformers does not load. torch's build for CPUs comes from an index of PyTorch's own, which pip
# must be told of.
serve: .venv-vllm/.serve  ## the tests of the plugin in vLLM for CPUs, in .venv-vllm (minutes, and 4 GB)
	.venv-vllm/bin/python -m pytest -W ignore tests/serve

.venv-vllm/.serve: pyproject.toml $(SOURCES)
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --editable '.[vllm]' pytest
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

wheels:  ## build the sdist and the wheels into dist/, and check them on every Python that is here (CONTRIBUTING.md: Release)
	$(PYTHON) release/wheels.py

debian:  ## make other goals in another Debian, with its Python and its compiler, as root: make debian SUITE=sid GOALS='run test'
	$(PYTHON) release/debian.py $(SUITE) make $(GOALS)

clean:
	rm -rf $(VENV) build dist output

# The last file that venv writes. What it had begun, and did not end, is made anew.
$(VENV)/bin/activate:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "linbias needs Python 3.11 or later, and $(PYTHON) is $$($(PYTHON) -V 2>&1): make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(if $(wildcard $(VENV)/pyvenv.cfg),--clear) $(VENV)

INSTALL := $(BIN)/python -m pip install --quiet $(CONSTRAINTS)
STOPPED := { echo "The install into $(VENV) stopped for the reason above. Once there is room on the disk and in /tmp (12 GB are enough) or" \
  "the network is back, the same make goes on; rm -r $(VENV) begins anew." >&2; exit 1; }

CXX_SOURCES := $(wildcard csrc/*.h csrc/*.cpp csrc/*/*.h csrc/*/*.cpp csrc/*/*/*.h bindings/*)
SOURCES := CMakeLists.txt $(CXX_SOURCES)

$(VENV)/.run: $(VENV)/bin/activate pyproject.toml constraints.txt $(SOURCES)
	@echo "installing linbias[lm] into $(VENV), which compiles its core: some minutes, once"
	@$(INSTALL) --editable '.[lm]' || $(STOPPED)
	touch $@

# labml-nn asks for torchvision and torchtext, which its attention does not use and which must match torch's
# build: installed without its dependencies, it needs only what is here already.
$(VENV)/.dev: $(VENV)/.run
	@echo "installing what tests and documentation need besides, linbias[dev], into $(VENV): some minutes, once"
	@$(INSTALL) 'linbias[dev]' && $(INSTALL) --no-deps labml-nn labml || $(STOPPED)
	touch $@
