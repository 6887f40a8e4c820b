"""The reference decode worker: fetches a finished prompt's state and generates the answer.

It is small on purpose: one process, one device, continuous batching, no prefix cache.  It exists
so that a WavePP prefill worker can be used and tested end to end; any engine that can speak
`transfer.desk_wire` can take its place.
"""
