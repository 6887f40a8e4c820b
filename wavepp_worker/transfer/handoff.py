"""The hand-off: what a prefill answer tells the decode worker, as JSON.  Pure.

It travels as `disaggregated_params["kv_transfer_params"]` through Dynamo's frontend, which does
not look inside.  It names holds and where to ask for them; addresses of memory are only told by
each stage's hold desk.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from wavepp_worker.base.errors import TransferError
from wavepp_worker.base.limits import STAGES_MAX
from wavepp_worker.wire.mailbox import StageHandoff

HANDOFF_VERSION = 1


class IncompatibleError(TransferError):
    """Prefill and decode worker do not fit together; computing again does not help."""


class Handoff(Struct, frozen=True, kw_only=True):
    """A finished prompt: its first answer token, and one hold per pipeline stage."""

    kind: Literal["wavepp"] = "wavepp"
    version: int = HANDOFF_VERSION
    fingerprint: str
    prompt_tokens: Annotated[int, Meta(ge=1)]
    block_tokens: Annotated[int, Meta(ge=1)]
    first_token: Annotated[int, Meta(ge=0)]
    first_logprob: float = 0.0
    stages: Annotated[tuple[StageHandoff, ...], Meta(min_length=1, max_length=STAGES_MAX)]

    def to_params(self) -> dict[str, Any]:
        """Return the JSON object for `kv_transfer_params`."""
        params: dict[str, Any] = msgspec.to_builtins(self)
        return params

    @classmethod
    def from_params(cls, params: object) -> Handoff:
        """Read and check a `kv_transfer_params` object.

        Raises:
            IncompatibleError: it is not a hand-off of this version, or its stages do not cover
                layers 0, 1, ... without gap or overlap.
        """
        if not isinstance(params, dict) or params.get("kind") != "wavepp":
            raise IncompatibleError(
                "kv_transfer_params is no WavePP hand-off: is the prefill worker another engine?"
            )
        version = params.get("version")
        if version != HANDOFF_VERSION:
            raise IncompatibleError(
                f"hand-off version {version!r}, this worker reads version {HANDOFF_VERSION}"
            )
        try:
            handoff = msgspec.convert(params, cls)
        except msgspec.ValidationError as error:
            raise IncompatibleError(f"malformed hand-off: {error}") from error
        handoff.check_stages()
        return handoff

    def check_stages(self) -> None:
        """Raise `IncompatibleError` unless the stages tile the layers in order."""
        layer = 0
        for index, stage in enumerate(self.stages):
            first, stop = stage.layers
            if stage.stage != index or first != layer or stop <= first:
                raise IncompatibleError(
                    f"hand-off stage {stage.stage} holds layers [{first}, {stop}), "
                    f"expected stage {index} from layer {layer} on"
                )
            if not stage.control_address.startswith("tcp://") or not stage.hold:
                raise IncompatibleError(f"hand-off stage {index} names no hold desk")
            layer = stop

    def check_fits(self, fingerprint: str, block_tokens: int, layers: int) -> None:
        """Raise `IncompatibleError` unless this decode worker can use the state."""
        if self.fingerprint != fingerprint:
            raise IncompatibleError(
                f"prefill computed with model {self.fingerprint}, this worker runs {fingerprint}: "
                "weights or cache format differ"
            )
        if self.block_tokens != block_tokens:
            raise IncompatibleError(
                f"prefill's block size is {self.block_tokens} tokens, this worker's {block_tokens}"
            )
        covered = self.stages[-1].layers[1]
        if covered != layers:
            raise IncompatibleError(
                f"prefill's stages cover {covered} layers, this model has {layers}"
            )
