"""One stage's layers: description, weights, cache pool, forward, sampling (torch)."""
