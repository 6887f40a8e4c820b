"""WavePP: a prefill-only, pipeline-parallel worker for NVIDIA Dynamo."""

__version__ = "0.1.0"
