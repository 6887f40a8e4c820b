"""vLLM 0.31.0's messages as literal values and bytes, and everything that a peer may get wrong."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavepp_worker.base.errors import ConfigError, TransferError
from wavepp_worker.vllm_decode import protocol
from wavepp_worker.vllm_decode.protocol import AgentMetadata, TransferParams
from wavepp_worker.vllm_decode.versions import (
    BlockLayout,
    Compatibility,
    block_layout,
    compatibility_hash,
    resolve_version,
)

FACTS = Compatibility(
    vllm_version="0.31.0",
    nixl_connector_version=13,
    model="/models/tiny",
    dtype="torch.float32",
    num_kv_heads=2,
    head_size=64,
    num_hidden_layers=4,
    attn_backend_name="CPU_ATTN",
    transfer_mode="push",
)
# Sorted keys, as json.dumps writes them.
HASHED = (
    '{"attn_backend_name": "CPU_ATTN", "cache_dtype": "auto", "dtype": "torch.float32", '
    '"head_size": 64, "is_hma_enabled": true, "model": "/models/tiny", '
    '"nixl_connector_version": 13, "num_hidden_layers": 4, "num_kv_heads": 2, '
    '"speculative_config": null, "transfer_mode": "push", "vllm_version": "0.31.0"}'
)


def metadata_tree(**changes: Any) -> dict[str, Any]:
    tree = {
        "engine_id": "decode-1",
        "agent_metadata": b"blob",
        "kv_caches_base_addr": [4096, 8192],
        "device_id": 0,
        "num_blocks": 8,
        "block_lens": [256, 256],
        "block_strides": [256, 256],
        "kv_cache_layout": "LBHNC",
        "block_size": 32,
        "ssm_sizes": (0, 0),
        "attn_backend_name": "CPU_ATTN",
        "physical_blocks_per_logical_kv_block": 1,
        "region_num_blocks": [8, 8],
        "region_group_ids": [0, 0],
        "region_names": ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"],
        "region_mem_types": ["DRAM", "DRAM"],
        "dcp_size": 1,
        "pcp_size": 1,
    }
    return tree | changes


def payload(tree: dict[str, Any], hash_text: str = "h") -> bytes:
    inner = msgspec.msgpack.encode(tree)
    return msgspec.msgpack.encode({"compatibility_hash": hash_text, "agent_metadata_bytes": inner})


def registration_tree(**changes: Any) -> dict[str, Any]:
    tree = {
        "request_id": "cmpl-abc-0-0123abcd",
        "decode_engine_id": "decode-1",
        "decode_host": "127.0.0.1",
        "decode_port": 5600,
        "decode_tp_size": 1,
        "local_block_ids": [[7, 3, 9]],
        "remote_engine_id": "wavepp-1",
        "remote_host": "127.0.0.1",
        "remote_port": 5700,
        "remote_tp_size": 1,
        "remote_pp_size": 2,
    }
    return tree | changes


def notification(tree: dict[str, Any]) -> bytes:
    return b"PUSH_REG:" + msgspec.msgpack.encode(tree)


def test_the_hash_covers_exactly_these_factors() -> None:
    assert compatibility_hash(FACTS) == hashlib.sha256(HASHED.encode()).hexdigest()


def test_another_mode_has_another_hash() -> None:
    pull = msgspec.structs.replace(FACTS, transfer_mode="pull")
    assert compatibility_hash(pull) != compatibility_hash(FACTS)


def test_known_versions_and_backends_only() -> None:
    version = resolve_version("0.31.0")
    assert (version.connector_version, version.kv_cache_layout) == (13, "LBHNC")
    assert block_layout(version, "CPU_ATTN") is BlockLayout.KEYS_TRANSPOSED
    with pytest.raises(ConfigError, match=r"0\.32\.0.*enforce_handshake_compat"):
        resolve_version("0.32.0")
    assert resolve_version("0.32.0", decode_checks=False) == version
    with pytest.raises(ConfigError, match="FLASHINFER"):
        block_layout(version, "FLASHINFER")


def test_our_payload_is_the_map_that_decode_reads() -> None:
    metadata = msgspec.convert(metadata_tree(), AgentMetadata)
    outer = msgspec.msgpack.decode(protocol.encode_payload(metadata, "h"))
    assert sorted(outer) == ["agent_metadata_bytes", "compatibility_hash"]
    inner = msgspec.msgpack.decode(outer["agent_metadata_bytes"])
    assert inner == metadata_tree(ssm_sizes=[0, 0])


def test_fields_of_decode_that_we_do_not_know_are_passed_over() -> None:
    frame = payload(metadata_tree(region_members=[["a"]], packed_member_layouts=None))
    assert protocol.decode_payload(frame, "h").engine_id == "decode-1"


def test_another_hash_is_refused_unless_it_is_not_checked() -> None:
    frame = payload(metadata_tree(), "other")
    with pytest.raises(TransferError, match="compatibility hash differs"):
        protocol.decode_payload(frame, "h")
    assert protocol.decode_payload(frame, None).num_blocks == 8


@pytest.mark.parametrize(
    "changes",
    [
        {"block_lens": [256]},
        {"block_strides": [256, 128]},
        {"region_names": ["a", "a"]},
        {"region_mem_types": ["DRAM"]},
        {"num_blocks": -1},
        {"engine_id": ""},
        {"kv_caches_base_addr": [0] * 5000},
    ],
)
def test_inconsistent_metadata_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(TransferError):
        protocol.decode_payload(payload(metadata_tree(**changes)), "h")


def test_layers_are_found_by_name_whatever_their_order() -> None:
    names = ["model.layers.1.self_attn.attn", "model.layers.0.self_attn.attn"]
    metadata = msgspec.convert(metadata_tree(), AgentMetadata)
    assert protocol.regions_of(metadata, names, block_tokens=32, block_bytes=256) == (1, 0)


@pytest.mark.parametrize(
    ("names", "block_tokens", "block_bytes", "message"),
    [
        (["model.layers.2.self_attn.attn"], 32, 256, "no cache region"),
        (["model.layers.0.self_attn.attn"], 16, 256, "32 tokens in 1 pieces, ours 16"),
        (["model.layers.0.self_attn.attn"], 32, 512, "256 bytes at decode, 512 here"),
    ],
)
def test_a_peer_with_other_blocks_is_refused(
    names: list[str], block_tokens: int, block_bytes: int, message: str
) -> None:
    metadata = msgspec.convert(metadata_tree(), AgentMetadata)
    with pytest.raises(TransferError, match=message):
        protocol.regions_of(metadata, names, block_tokens=block_tokens, block_bytes=block_bytes)


def test_the_side_channel_request_as_bytes() -> None:
    frame = b"\x93\xc4\x0cget_meta_msg\x01\x00"
    assert protocol.encode_request(1, 0) == frame
    assert protocol.decode_request(frame) == (1, 0)


@pytest.mark.parametrize(
    "frame", [b"", b"\x93\xc4\x03abc\x00\x00", b"\x92\xc4\x0cget_meta_msg\x00", b"x" * 300]
)
def test_other_side_channel_requests_are_refused(frame: bytes) -> None:
    with pytest.raises(TransferError):
        protocol.decode_request(frame)


def test_a_registration_as_decode_sends_it() -> None:
    registration = protocol.decode_registration(notification(registration_tree()))
    assert registration.local_block_ids == ((7, 3, 9),)
    assert protocol.producer_request_id(registration.request_id) == "cmpl-abc-0"
    again = protocol.decode_registration(protocol.encode_registration(registration))
    assert again == registration


@pytest.mark.parametrize(
    "changes",
    [
        {"local_block_ids": [[1, 0]]},
        {"local_block_ids": [[1, 1]]},
        {"local_block_ids": [[-1]]},
        {"local_block_ids": [[1 << 31]]},
        {"local_block_ids": []},
        {"local_block_ids": [[]] * 65},
        {"local_block_ids": [list(range(1, 65_538))]},
        {"decode_port": 0},
        {"decode_tp_size": 0},
        {"request_id": ""},
        {"decode_host": "h" * 513},
    ],
)
def test_registrations_out_of_bounds_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(TransferError):
        protocol.decode_registration(notification(registration_tree(**changes)))


def test_a_registration_without_a_key_is_refused() -> None:
    tree = registration_tree()
    del tree["local_block_ids"]
    with pytest.raises(TransferError, match="local_block_ids"):
        protocol.decode_registration(notification(tree))


def test_a_list_that_announces_more_than_it_holds_allocates_nothing() -> None:
    with pytest.raises(TransferError):
        protocol.decode_registration(b"PUSH_REG:\x81\xafl" + b"\xdd\xff\xff\xff\xff")
    with pytest.raises(TransferError, match="exceeds"):
        protocol.decode_registration(b"PUSH_REG:" + bytes((1 << 20) + 1))


@given(st.binary(max_size=200))
def test_garbage_is_a_transfer_error_and_nothing_else(noise: bytes) -> None:
    for parse in (
        protocol.decode_registration,
        protocol.decode_request,
        lambda frame: protocol.decode_registration(b"PUSH_REG:" + frame),
        lambda frame: protocol.decode_payload(frame, None),
        protocol.parse_completion,
    ):
        try:
            parse(noise)
        except TransferError:
            continue


@pytest.mark.parametrize(
    ("theirs_id", "ours_id"),
    [
        ("cmpl-abc-0-0123abcd", "cmpl-abc-0"),
        ("a-01234567-89abcdef", "a-01234567"),  # one suffix, not two
        ("5f0c-0123ABCD", "5f0c-0123ABCD"),
        ("abc", "abc"),
        ("abc-0123abcd\n", "abc-0123abcd\n"),
    ],
)
def test_request_ids_match_after_one_suffix_is_gone(theirs_id: str, ours_id: str) -> None:
    assert protocol.producer_request_id(theirs_id) == ours_id


def test_decode_takes_the_tail_that_it_lacks() -> None:
    ours = list(range(100, 113))
    assert protocol.pair_blocks(ours, [5, 9, 2]) == [(110, 5), (111, 9), (112, 2)]
    assert protocol.pair_blocks(ours, []) == []
    with pytest.raises(TransferError, match="14 blocks of a prompt of 13"):
        protocol.pair_blocks(ours, list(range(1, 15)))


def test_completion_notices_and_their_number() -> None:
    assert protocol.completion_notice("cmpl-a:b-0123abcd", 1) == b"cmpl-a:b-0123abcd:1"
    assert protocol.parse_completion(b"cmpl-a:b-0123abcd:1") == ("cmpl-a:b-0123abcd", 1)
    assert protocol.completions_expected(pp_size=2, producer_tp=1, decode_tp=1) == 2
    assert protocol.completions_expected(pp_size=3, producer_tp=4, decode_tp=2) == 6
    assert protocol.completions_expected(pp_size=3, producer_tp=1, decode_tp=2) == 3


def params(**changes: Any) -> TransferParams:
    values: dict[str, Any] = {
        "remote_block_ids": ((1, 2),),
        "remote_engine_id": "e",
        "remote_request_id": "r",
        "remote_host": "127.0.0.1",
        "remote_port": 5700,
        "pp_size": 2,
        "remote_num_tokens": 40,
        "transfer_mode": "push",
    }
    return TransferParams(**values | changes)


def test_transfer_params_always_have_every_key() -> None:
    assert protocol.encode_params(params()) == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2]],
        "remote_engine_id": "e",
        "remote_request_id": "r",
        "remote_host": "127.0.0.1",
        "remote_port": 5700,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 2,
        "remote_num_tokens": 40,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "push",
    }


@pytest.mark.parametrize("changes", [{"remote_engine_id": ""}, {"remote_port": 0}, {"pp_size": 0}])
def test_invalid_transfer_params_are_never_handed_out(changes: dict[str, Any]) -> None:
    with pytest.raises(TransferError):
        protocol.encode_params(params(**changes))
