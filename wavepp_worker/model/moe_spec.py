"""The mixture-of-experts layers of a model, as the loader and the forward need them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from wavepp_worker.base.errors import ConfigError
from wavepp_worker.model.mlp_spec import SituSpec

Count = Annotated[int, Meta(ge=1)]
Width = Annotated[int, Meta(ge=0)]


class MoeNames(Struct, frozen=True, kw_only=True):
    """What a checkpoint calls the parts of a layer with experts."""

    layer: str = "mlp"
    router: str = "gate"
    selection_bias: str = "gate.e_score_correction_bias"
    gate: str = "gate_proj"  # of one expert
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts"
    shared_gate: str = "shared_expert_gate"
    latent_down: str = "routed_expert_down_proj"
    latent_norm: str = "routed_expert_norm"
    latent_up: str = "routed_expert_up_proj"


class MoeSpec(Struct, frozen=True, kw_only=True):
    """Layers whose feed-forward is a few experts per token, chosen by a router.

    Attributes:
        layers: their indices in the model, rising; the other layers have one dense MLP.
        chosen: experts per token.
        width: hidden width of one expert.
        shared_width: hidden width of what every token passes through beside its experts; 0: none.
        has_shared_gate: what the shared part adds is scaled by the sigmoid of one logit per token.
        scores: how router logits become scores; weights are the scores of the chosen experts.
        has_selection_bias: a bias per expert is added to choose, not to weigh.
        is_renormalised: the weights of a token are divided by their sum.
        scale: the weights are multiplied by it.
        latent: width of what the experts read and write; 0: the model's own.
        latent_eps: of the norm behind latent experts.
        situ: the experts' activation; None: SiLU.
        groups, groups_kept: experts come in so many equal groups, and only the experts of the
            best groups of a token (by the sum of their two best) may be chosen.
    """

    layers: tuple[int, ...]
    experts: int
    chosen: int
    width: int
    shared_width: int = 0
    has_shared_gate: bool = False
    scores: Literal["softmax", "sigmoid"]
    has_selection_bias: bool = False
    is_renormalised: bool
    scale: float = 1.0
    latent: int = 0
    latent_eps: float = 1e-6
    situ: SituSpec | None = None
    groups: int = 1
    groups_kept: int = 1
    names: MoeNames = MoeNames()


def check_moe(spec: MoeSpec, path: Path) -> MoeSpec:
    """Return `spec`.

    Raises:
        ConfigError: a token cannot choose so many experts, or the groups do not divide them.
    """
    size = spec.experts // spec.groups
    if spec.experts % spec.groups or (spec.groups > 1 and size < 2):
        raise ConfigError(
            f"{path}: {spec.experts} experts cannot form {spec.groups} equal groups of 2 or more"
        )
    if not 1 <= spec.groups_kept <= spec.groups:
        raise ConfigError(f"{path}: {spec.groups_kept} of {spec.groups} groups cannot be kept")
    if not 1 <= spec.chosen <= spec.groups_kept * size:
        raise ConfigError(
            f"{path}: {spec.chosen} experts per token, of {spec.groups_kept * size} to choose from"
        )
    return spec


def moe_shapes(block: str, spec: MoeSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the tensors of one layer with experts, its norm aside."""
    names, layer = spec.names, f"{block}.{spec.names.layer}"
    shapes: dict[str, tuple[int, ...]] = {
        f"{layer}.{names.router}.weight": (spec.experts, hidden),
    }
    if spec.has_selection_bias:
        shapes[f"{layer}.{names.selection_bias}"] = (spec.experts,)
    rows = spec.latent or hidden
    if spec.latent:
        shapes[f"{layer}.{names.latent_down}.weight"] = (rows, hidden)
        shapes[f"{layer}.{names.latent_norm}.weight"] = (rows,)
        shapes[f"{layer}.{names.latent_up}.weight"] = (hidden, rows)
    for expert in range(spec.experts):
        prefix = f"{layer}.experts.{expert}"
        shapes[f"{prefix}.{names.gate}.weight"] = (spec.width, rows)
        shapes[f"{prefix}.{names.up}.weight"] = (spec.width, rows)
        shapes[f"{prefix}.{names.down}.weight"] = (rows, spec.width)
    if spec.shared_width:
        shared = f"{layer}.{names.shared}"
        shapes[f"{shared}.gate_proj.weight"] = (spec.shared_width, hidden)
        shapes[f"{shared}.up_proj.weight"] = (spec.shared_width, hidden)
        shapes[f"{shared}.down_proj.weight"] = (hidden, spec.shared_width)
    if spec.has_shared_gate:
        shapes[f"{layer}.{names.shared_gate}.weight"] = (1, hidden)
    return shapes
