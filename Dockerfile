# syntax=docker/dockerfile:1
# WavePP's workers on one of Dynamo's runtime images, which brings torch, NIXL, UCX and Dynamo.
#   docker build -t registry.example/wavepp:0.1.0 .
# The base's release must be the Dynamo that pyproject.toml pins; a test compares them.
ARG BASE=nvcr.io/nvidia/ai-dynamo/vllm-runtime:1.6.1

FROM python:3.12-slim AS build
COPY --from=ghcr.io/astral-sh/uv:0.13.9 /uv /usr/local/bin/uv
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY components ./components
COPY graphs ./graphs
COPY kv_router_hooks ./kv_router_hooks
COPY wavepp_worker ./wavepp_worker
RUN uv build --wheel --out-dir /dist

# hadolint ignore=DL3006
FROM ${BASE}
USER root
# The base has every dependency already; --no-deps keeps its torch and its NIXL.
RUN --mount=type=bind,from=build,source=/dist,target=/dist \
    uv pip install --system --no-cache --no-deps /dist/*.whl \
    && python3 -c "import components.prefill_worker, components.decode_worker, graphs.disagg"
USER 1000:0
WORKDIR /workspace
ENTRYPOINT ["python3", "-m", "wavepp_worker"]
