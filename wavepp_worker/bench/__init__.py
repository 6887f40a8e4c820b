"""Benchmarks that ship with the worker; each prints its command, machine facts and distribution."""
