"""Greedy packing today; the MPU planner stands behind the same port later."""
