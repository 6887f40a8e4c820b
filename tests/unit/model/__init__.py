"""Unit tests of wavepp_worker.model."""
