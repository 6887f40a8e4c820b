# make serve    install what is missing, prepare the demo model, start a graph you can chat with
# make test     install what is missing, run the tests (ARGS="..." for pytest)
# make slow     the tests that need the demo model or minutes
# make check    lint, types, layers
# make mutants  plant one-line faults in the core and show that a test sees each
# make manifests  render configs/kubernetes again, after a change of what it is made of
# make gpu-test   numerics on a CUDA device, with a Python that has torch (GPU_PYTHON, WHEELS=folder: requirements/gpu.in)
# make gpu-bench  times of stages of published shapes there, as JSON in OUT
# make vllm-env    an environment with stock vLLM (CPU, 4 GB) for configs/vllm-decode-cpu.yaml
# make vllm-test   answers of a stock vLLM decode worker that our stages push into (10 minutes)
# make clean    remove the virtual environment (the model in the cache stays)

PYTHON ?= python3
TORCH  ?= torch==2.13.0
CACHE  ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/wavepp
MODEL  ?= $(CACHE)/smollm2-135m-instruct
PORT   ?= 8000
ARGS   ?=
GPU_PYTHON ?= python3
WHEELS ?=
OUT    ?= build/gpu
VLLM   ?= $(CACHE)/vllm
VENV   := .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip --disable-pip-version-check --timeout 60 --retries 8

export UV_HTTP_TIMEOUT ?= 60
export UV_SYSTEM_CERTS ?= $(if $(wildcard /etc/ssl/certs/ca-certificates.crt),true,false)

# The locks are complete, so nothing is resolved.  uv is the fast way, pip the sure one.
INSTALL := $(SHELL) -c '$(PY) -m uv pip install -q --python $(PY) --no-deps "$$@" || $(PIP) install -q --no-deps "$$@"' install

.PHONY: serve test slow check schema manifests mutants gpu-site gpu-test gpu-bench vllm-env vllm-test services clean

serve: $(VENV)/.run $(MODEL)/model.safetensors
	@$(VENV)/bin/dynamo serve graphs.disagg -f configs/smollm2-cpu.yaml \
	  --set "Common.model.path=$(MODEL)" --port $(PORT) $(ARGS)

test: $(VENV)/.test $(MODEL)/model.safetensors services
	@WAVEPP_MODEL="$(MODEL)" $(PY) -m pytest $(ARGS)

slow: $(VENV)/.test $(MODEL)/model.safetensors
	@WAVEPP_MODEL="$(MODEL)" $(PY) -m pytest -m slow $(ARGS)

check: $(VENV)/.test
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(VENV)/bin/lint-imports

mutants: $(VENV)/.test
	@$(PY) tools/mutants.py $(ARGS)

schema: $(VENV)/.run
	@$(VENV)/bin/wavepp print-schema > configs/schema.json

manifests: $(VENV)/.run
	@for page in configs/kubernetes/*/README.md; do \
	  PATH="$(VENV)/bin:$$PATH" $(SHELL) -ec "$$(grep '^wavepp render' $$page)"; done

# vLLM pins other versions of half of everything, so it has an environment of its own.
vllm-env: $(VLLM)/.vllm

$(VLLM)/.vllm: requirements/vllm.lock
	@echo "• stock vLLM in $(VLLM) (4 GB)"
	@$(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip install -q --timeout 60 --retries 8 "$(TORCH)" uv==0.13.9
	@$(VLLM)/bin/python -m uv pip install -q --python $(VLLM)/bin/python --no-deps -r requirements/vllm.lock
	@touch $@

vllm-test: $(VENV)/.test vllm-env
	@WAVEPP_VLLM_PYTHON="$(VLLM)/bin/python" $(PY) -m pytest -m slow tests/vllm $(ARGS)

# Nothing is installed on such a host: carried wheels are unpacked beside the results.
GPU_RUN := PYTHONUNBUFFERED=1 PYTHONPATH="$(OUT)/site:$(CURDIR)" $(GPU_PYTHON)

gpu-site:
	@mkdir -p $(OUT)/site
	@for wheel in $(wildcard $(WHEELS)/*.whl); do $(GPU_PYTHON) -m zipfile -e $$wheel $(OUT)/site; done

gpu-test: gpu-site
	@$(GPU_RUN) -m pytest -c /dev/null --rootdir=. -p no:cacheprovider -q --durations=5 tests/numerics/test_cuda.py $(ARGS)

gpu-bench: gpu-site
	@for shape in qwen3-8b/18 qwen3-30b-a3b/8 kimi-linear-48b/4 qwen3-next-80b/4; do \
	  $(GPU_RUN) -m wavepp_worker bench stage --model configs/shapes/$${shape%/*} --load-format dummy \
	    --layers $${shape#*/} --contexts 0,65536,118784 --waves 1024,4096,16384 \
	    --json $(OUT)/$${shape%/*}.json $(ARGS) || exit; \
	done

# Some tests run on etcd and NATS; without the two servers they are skipped.
services:
	@command -v etcd >/dev/null && command -v nats-server >/dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "• etcd and NATS for the tests"; \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	      apt-get install -y -qq --no-install-recommends etcd-server nats-server >/dev/null; \
	  else \
	    echo "• etcd or nats-server is not installed: tests that need them are skipped"; \
	  fi; }

# One virtual environment, one stamp per stage; a changed input runs only its stage again.
$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 14) else \
	  "WavePP needs Python 3.11 to 3.13, this is %d.%d: make PYTHON=python3.12" % v)'
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
	  { echo "Python's venv module is incomplete: apt-get install python3-venv"; exit 1; }
	@echo "• virtual environment and $(TORCH) (the largest download)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install -q -c requirements/run.lock "$(TORCH)" uv==0.13.9
	@touch $@

$(VENV)/.run: $(VENV)/.torch requirements/run.lock pyproject.toml
	@echo "• Dynamo, NIXL and the other pinned packages"
	@$(INSTALL) -r requirements/run.lock
	@$(INSTALL) --no-build-isolation -e .
	@touch $@

$(VENV)/.test: $(VENV)/.run requirements/test.lock
	@echo "• test tools"
	@$(INSTALL) -r requirements/test.lock
	@touch $@

$(MODEL)/model.safetensors: | $(VENV)/.run
	@echo "• demo model (90 MB)"
	@$(PY) tools/fetch_model.py "$(MODEL)"

clean:
	rm -rf $(VENV)
