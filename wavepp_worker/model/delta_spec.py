"""The linear-attention layers of a model, as the plan, the loader and the forward need them."""

from __future__ import annotations

from msgspec import Struct

from wavepp_worker.base.units import ceil_div

STATE_BYTES = 4  # of one number of a recurrent state, whatever the model's type: fp32
LAYER_ALIGNMENT = 16  # of each layer within a slot, so that every view of it is aligned


class DeltaSpec(Struct, frozen=True, kw_only=True):
    """Layers whose cache is one recurrent state and the tail of a convolution, not keys and values.

    Attributes:
        layers: their indices in the model, rising.
        key_heads: each serves value_heads / key_heads neighbouring value heads.
        kernel: width of the convolution over queries, keys and values.
        is_grouped: the checkpoint's input projections lie key head by key head.
        decay_rank: width through which a decay per key channel comes (KDA); 0: one per head (GDN).
        gate_rank: width through which a KDA layer's output gate comes; 0: at once.
        decay_bound: a decay in log space is above it; None: not bounded.
    """

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    is_grouped: bool = False
    decay_rank: int = 0
    gate_rank: int = 0
    decay_bound: float | None = None

    @property
    def channels(self) -> int:
        """Channels of the convolution: all queries, all keys, all values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def tail_rows(self) -> int:
        """Earlier rows that the convolution of the next token reads."""
        return self.kernel - 1

    @property
    def state_bytes(self) -> int:
        """Bytes of one layer's recurrent state."""
        return self.value_heads * self.key_dim * self.value_dim * STATE_BYTES

    def layer_bytes(self, dtype_bytes: int) -> int:
        """Return one layer's bytes in a slot: state, then tail in the model's type."""
        tail_bytes = self.tail_rows * self.channels * dtype_bytes
        units = ceil_div(self.state_bytes + tail_bytes, LAYER_ALIGNMENT)
        return units * LAYER_ALIGNMENT
