"""Multi-head latent attention of a model, as the plan, the loader and the forward need it."""

from __future__ import annotations

from msgspec import Struct


class MlaSpec(Struct, frozen=True, kw_only=True):
    """Attention that caches one latent row per token, from which all keys and values come.

        row = [c, k_r] ;  key of head h = [W_uk,h c, k_r] ;  value of head h = W_uv,h c

    Attributes:
        q_rank: width of the compressed query; None: queries are made at once.
        kv_rank: width of c.
        nope_dim, rope_dim: widths of a key's parts; the second is shared by all heads and turns.
        value_dim: width of a value.
        scale: of query times key.
        is_interleaved: checkpoints store the dimensions that turn together as neighbours.
        has_gate: g_proj makes a gate from the layer's input; its sigmoid scales the output.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    is_interleaved: bool
    has_gate: bool = False

    @property
    def key_dim(self) -> int:
        """Width of a query, and of a key once expanded."""
        return self.nope_dim + self.rope_dim

    @property
    def row_dim(self) -> int:
        """Numbers cached per token and layer."""
        return self.kv_rank + self.rope_dim


def mla_shapes(block: str, spec: MlaSpec, hidden: int, heads: int) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the tensors of one layer's attention, its norm aside."""
    layer, q_rows = f"{block}.self_attn", heads * spec.key_dim
    shapes: dict[str, tuple[int, ...]] = {}
    if spec.q_rank is None:
        shapes[f"{layer}.q_proj.weight"] = (q_rows, hidden)
    else:
        shapes[f"{layer}.q_a_proj.weight"] = (spec.q_rank, hidden)
        shapes[f"{layer}.q_a_layernorm.weight"] = (spec.q_rank,)
        shapes[f"{layer}.q_b_proj.weight"] = (q_rows, spec.q_rank)
    kv_rows = heads * (spec.nope_dim + spec.value_dim)
    shapes[f"{layer}.kv_a_proj_with_mqa.weight"] = (spec.row_dim, hidden)
    shapes[f"{layer}.kv_a_layernorm.weight"] = (spec.kv_rank,)
    shapes[f"{layer}.kv_b_proj.weight"] = (kv_rows, spec.kv_rank)
    if spec.has_gate:
        shapes[f"{layer}.g_proj.weight"] = (heads * spec.value_dim, hidden)
    shapes[f"{layer}.o_proj.weight"] = (hidden, heads * spec.value_dim)
    return shapes


def half_order(spec: MlaSpec, parts: int, fixed: int) -> list[int]:
    """Return the order of rows that brings dimension i beside i + rope_dim / 2, as `turn` turns.

    Args:
        parts: the rows are so many parts, each `fixed` rows that stay and `rope_dim` that turn.
    """
    turning = list(range(spec.rope_dim))
    if spec.is_interleaved:
        turning = turning[0::2] + turning[1::2]
    part = [*range(fixed), *(fixed + row for row in turning)]
    return [index * len(part) + row for index in range(parts) for row in part]
