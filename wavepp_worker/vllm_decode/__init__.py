"""Handing finished cache to a stock vLLM decode worker: its protocol, its layouts, our side of it.

Not wired into serving yet; `docs/decode-pools.md` says what exists.
"""
