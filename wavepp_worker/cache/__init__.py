"""Everything one rank knows and promises about its own cache: books only, no tensors.

`hashing` names blocks, `tree` holds what can be matched, `index` answers hints, `pool` owns the
slots of both tiers, `lease` pins a prefix, `escrow` reserves room for the rest, `sequence` owns
both after admission, and `rank_cache` is the facade that the WAVE process uses.  What differs
between kinds of windows is behind the protocol in `parts`: `dense`, `sliding`, `recurrent`.
"""
