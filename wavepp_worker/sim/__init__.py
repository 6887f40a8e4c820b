"""Simulations and test machines: the production code under virtual time, seeds and models."""
