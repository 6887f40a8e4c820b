"""The hand-off survives JSON and refuses everything that is not one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from wavepp_worker.transfer.handoff import Handoff, IncompatibleError
from wavepp_worker.wire.mailbox import StageHandoff


def make_handoff() -> Handoff:
    return Handoff(
        fingerprint="f",
        prompt_tokens=70,
        block_tokens=16,
        first_token=5,
        first_logprob=-0.5,
        stages=(
            StageHandoff(0, (0, 2), "tcp://127.0.0.1:1", "a"),
            StageHandoff(1, (2, 5), "tcp://127.0.0.1:2", "b"),
        ),
    )


def test_it_survives_json() -> None:
    handoff = make_handoff()
    assert Handoff.from_params(json.loads(json.dumps(handoff.to_params()))) == handoff


def test_it_avoids_the_keys_that_dynamo_takes_away() -> None:
    keys = make_handoff().to_params()
    assert not {"bootstrap_host", "bootstrap_port", "bootstrap_room"} & set(keys)


def stage(index: int, **changes: Any) -> Callable[[dict[str, Any]], None]:
    names = ("stage", "layers", "control_address", "hold")

    def change(params: dict[str, Any]) -> None:
        entry = list(params["stages"][index])
        for name, value in changes.items():
            entry[names.index(name)] = value
        params["stages"] = [*params["stages"][:index], entry, *params["stages"][index + 1 :]]

    return change


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda p: p.update(kind="vllm"), "no WavePP hand-off"),
        (lambda p: p.pop("kind"), "no WavePP hand-off"),
        (lambda p: p.update(version=2), "version 2, this worker reads version 1"),
        (lambda p: p.pop("version"), "version None"),
        (lambda p: p.update(prompt_tokens=0), "malformed"),
        (lambda p: p.update(prompt_tokens="70"), "malformed"),
        (lambda p: p.update(first_token=-1), "malformed"),
        (lambda p: p.update(stages=[]), "malformed"),
        (lambda p: p.pop("fingerprint"), "malformed"),
        (stage(1, layers=(3, 5)), "expected stage 1 from layer 2"),
        (stage(1, layers=(1, 5)), "expected stage 1 from layer 2"),
        (stage(1, layers=(2, 2)), "expected stage 1 from layer 2"),
        (stage(1, stage=2), "expected stage 1"),
        (stage(0, layers=(1, 2)), "expected stage 0 from layer 0"),
        (stage(0, control_address="ipc:///etc"), "no hold desk"),
        (stage(0, hold=""), "no hold desk"),
    ],
)
def test_anything_else_is_refused(change: Callable[[dict[str, Any]], Any], text: str) -> None:
    """FS-66"""
    params = json.loads(json.dumps(make_handoff().to_params()))
    change(params)
    with pytest.raises(IncompatibleError, match=text):
        Handoff.from_params(params)


@pytest.mark.parametrize("params", [None, [], "wavepp", {}])
def test_no_object_at_all_is_refused(params: object) -> None:
    with pytest.raises(IncompatibleError, match="no WavePP hand-off"):
        Handoff.from_params(params)


@pytest.mark.parametrize(
    ("fingerprint", "block_tokens", "layers", "text"),
    [
        ("g", 16, 5, "computed with model f, this worker runs g"),
        ("f", 64, 5, "block size is 16 tokens, this worker's 64"),
        ("f", 16, 6, "cover 5 layers, this model has 6"),
    ],
)
def test_workers_that_do_not_fit(
    fingerprint: str, block_tokens: int, layers: int, text: str
) -> None:
    """FS-66: the field that differs is named."""
    make_handoff().check_fits("f", 16, 5)
    with pytest.raises(IncompatibleError, match=text):
        make_handoff().check_fits(fingerprint, block_tokens, layers)
