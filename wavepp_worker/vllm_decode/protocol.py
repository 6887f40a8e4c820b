"""Messages between a producer of cache and vLLM's connector: encoding, bounds, matching.  Pure.

    decode ── (get_meta_msg, pp rank, tp rank) ──▶ side channel ── payload, clock ──▶ decode
    decode ── PUSH_REG: registration ──▶ stage's agent ── WRITE, notice ──▶ decode

Peers are not trusted: a frame's size is checked before it is decoded, and every list is bounded by
its type.  What cannot be used is a `TransferError`; it ends one hand-off, nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta, Struct

from wavepp_worker.base.errors import TransferError, check
from wavepp_worker.vllm_decode.versions import TransferMode

T = TypeVar("T")

REGISTRATION_PREFIX: Final = b"PUSH_REG:"
METADATA_REQUEST: Final = b"get_meta_msg"
BLOCKS_MAX: Final = 1 << 16  # of one request: 2M tokens in vLLM's smallest blocks on CPU
REGIONS_MAX: Final = 4096
GROUPS_MAX: Final = 64
REQUEST_FRAME_BYTES_MAX: Final = 256
REGISTRATION_BYTES_MAX: Final = 1 << 20
PAYLOAD_BYTES_MAX: Final = 4 << 20

Text = Annotated[str, Meta(min_length=1, max_length=512)]
Port = Annotated[int, Meta(ge=1, le=65_535)]
Size = Annotated[int, Meta(ge=1, le=1024)]
Number = Annotated[int, Meta(ge=0)]
Index = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
PerRegion = Annotated[tuple[Number, ...], Meta(max_length=REGIONS_MAX)]
NamePerRegion = Annotated[
    tuple[Annotated[str, Meta(max_length=512)], ...], Meta(max_length=REGIONS_MAX)
]
Blocks = Annotated[tuple[Index, ...], Meta(max_length=BLOCKS_MAX)]

_SUFFIX = re.compile(r"-[0-9a-f]{8}\Z")


class AgentMetadata(Struct, kw_only=True, frozen=True):
    """One agent's memory as the handshake describes it: a region for each attention layer."""

    engine_id: Text
    agent_metadata: Annotated[bytes, Meta(max_length=PAYLOAD_BYTES_MAX)]  # NIXL's blob
    kv_caches_base_addr: PerRegion
    device_id: Index
    num_blocks: Index
    block_lens: PerRegion  # bytes
    block_strides: PerRegion  # bytes
    kv_cache_layout: Text
    block_size: Index  # tokens
    ssm_sizes: tuple[Number, Number] = (0, 0)  # bytes of recurrent state
    attn_backend_name: Text
    physical_blocks_per_logical_kv_block: Size = 1
    region_num_blocks: PerRegion = ()
    region_group_ids: PerRegion = ()
    region_names: NamePerRegion = ()
    region_mem_types: NamePerRegion = ()
    dcp_size: Size = 1
    pcp_size: Size = 1


class HandshakePayload(Struct, kw_only=True, frozen=True):
    """First frame of the side channel's reply; the metadata stay encoded until the hash matched."""

    compatibility_hash: Annotated[str, Meta(max_length=128)]
    agent_metadata_bytes: Annotated[bytes, Meta(max_length=PAYLOAD_BYTES_MAX)]


class MetadataRequest(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Decode asks for the metadata of one of our ranks, or we for one of decode's."""

    name: Annotated[bytes, Meta(max_length=32)]
    pp_rank: Annotated[int, Meta(ge=0, le=1023)]
    tp_rank: Annotated[int, Meta(ge=0, le=1023)]


class PushRegistration(Struct, kw_only=True, frozen=True):
    """Decode has allocated blocks for a request and waits until every producer has written."""

    request_id: Text  # decode's, in full: with its suffix
    decode_engine_id: Text
    decode_host: Text
    decode_port: Port
    decode_tp_size: Size
    local_block_ids: Annotated[tuple[Blocks, ...], Meta(min_length=1, max_length=GROUPS_MAX)]
    remote_engine_id: Text  # ours
    remote_host: Text
    remote_port: Port
    remote_tp_size: Size
    remote_pp_size: Size


class TransferParams(Struct, kw_only=True, frozen=True):
    """`kv_transfer_params` of our answer.  Always whole: a missing key kills decode's engine."""

    remote_block_ids: tuple[tuple[int, ...], ...]
    remote_engine_id: Text
    remote_request_id: Text
    remote_host: Text
    remote_port: Port
    pp_size: Size
    remote_num_tokens: Annotated[int, Meta(ge=1)]
    transfer_mode: TransferMode
    do_remote_prefill: bool = True
    do_remote_decode: bool = False
    tp_size: Size = 1
    dcp_size: Size = 1
    remote_blocks_expiry_time: float | None = None


_ENCODER = msgspec.msgpack.Encoder()
_PAYLOAD = msgspec.msgpack.Decoder(HandshakePayload)
_METADATA = msgspec.msgpack.Decoder(AgentMetadata)
_REQUEST = msgspec.msgpack.Decoder(MetadataRequest)
_REGISTRATION = msgspec.msgpack.Decoder(PushRegistration)


def encode_payload(metadata: AgentMetadata, compatibility_hash: str) -> bytes:
    """Return the side channel's answer for one rank."""
    _check_metadata(metadata)
    payload = HandshakePayload(
        compatibility_hash=compatibility_hash, agent_metadata_bytes=_ENCODER.encode(metadata)
    )
    return _ENCODER.encode(payload)


def decode_payload(frame: bytes, expected_hash: str | None) -> AgentMetadata:
    """Return a peer's metadata.

    Args:
        expected_hash: None if the peer's hash is not to be checked.

    Raises:
        TransferError: too large, malformed, inconsistent, or of an incompatible peer.
    """
    payload = _decode(_PAYLOAD, frame, PAYLOAD_BYTES_MAX, "handshake payload")
    if expected_hash is not None and payload.compatibility_hash != expected_hash:
        raise TransferError(
            "vLLM's compatibility hash differs from ours: vLLM version, model string, dtype, "
            "heads, layers, attention backend or transfer mode are not the same "
            f"(theirs {payload.compatibility_hash[:12]}, ours {expected_hash[:12]})"
        )
    metadata = _decode(_METADATA, payload.agent_metadata_bytes, PAYLOAD_BYTES_MAX, "agent metadata")
    _check_metadata(metadata)
    return metadata


def regions_of(
    metadata: AgentMetadata, names: Sequence[str], *, block_tokens: int, block_bytes: int
) -> tuple[int, ...]:
    """Return where decode keeps each named layer, as positions in its lists.

    Args:
        names: of our layers, e.g. `model.layers.3.self_attn.attn`.
        block_bytes: of one layer of one block.

    Raises:
        TransferError: a layer is missing there, or its blocks have another size.
    """
    if metadata.block_size != block_tokens or metadata.physical_blocks_per_logical_kv_block != 1:
        raise TransferError(
            f"decode's block size is {metadata.block_size} tokens in "
            f"{metadata.physical_blocks_per_logical_kv_block} pieces, ours {block_tokens} in one"
        )
    position = {name: index for index, name in enumerate(metadata.region_names)}
    missing = [name for name in names if name not in position]
    if missing:
        raise TransferError(f"decode has no cache region {missing[0]!r}")
    regions = tuple(position[name] for name in names)
    for name, region in zip(names, regions, strict=True):
        if metadata.block_lens[region] != block_bytes:
            raise TransferError(
                f"a block of {name} has {metadata.block_lens[region]} bytes at decode, "
                f"{block_bytes} here"
            )
    return regions


def encode_request(pp_rank: int, tp_rank: int) -> bytes:
    """Return the question for one rank's metadata."""
    return _ENCODER.encode(MetadataRequest(METADATA_REQUEST, pp_rank, tp_rank))


def decode_request(frame: bytes) -> tuple[int, int]:
    """Return the (pp rank, tp rank) that a side channel is asked for.

    Raises:
        TransferError: not such a question.
    """
    request = _decode(_REQUEST, frame, REQUEST_FRAME_BYTES_MAX, "side-channel request")
    if request.name != METADATA_REQUEST:
        raise TransferError(f"unknown side-channel request {request.name!r}")
    return request.pp_rank, request.tp_rank


def encode_registration(registration: PushRegistration) -> bytes:
    """Return the notification that decode sends to a stage's agent."""
    return REGISTRATION_PREFIX + _ENCODER.encode(registration)


def decode_registration(notification: bytes) -> PushRegistration:
    """Return the registration in a notification of decode.

    Raises:
        TransferError: not a registration, too large, malformed, or with blocks no write may touch.
    """
    if not notification.startswith(REGISTRATION_PREFIX):
        raise TransferError("the notification is not a push registration")
    registration = _decode(
        _REGISTRATION,
        memoryview(notification)[len(REGISTRATION_PREFIX) :],
        REGISTRATION_BYTES_MAX,
        "push registration",
    )
    for blocks in registration.local_block_ids:
        if 0 in blocks:
            raise TransferError("the registration names vLLM's null block")
        if len(set(blocks)) != len(blocks):
            raise TransferError("the registration names a block twice")
    return registration


def encode_params(params: TransferParams) -> dict[str, Any]:
    """Return `kv_transfer_params` as JSON values, with every key.

    Raises:
        TransferError: a value is out of its range; nothing incomplete is ever handed out.
    """
    try:
        tree = msgspec.json.decode(msgspec.json.encode(params))
        msgspec.convert(tree, TransferParams)
    except msgspec.ValidationError as error:
        raise TransferError(f"kv_transfer_params would be invalid: {error}") from error
    return dict(tree)


def producer_request_id(request_id: str) -> str:
    """Return the id under which the producer knows a request: without vLLM's random suffix."""
    return _SUFFIX.sub("", request_id)


def pair_blocks(ours: Sequence[int], theirs: Sequence[int]) -> list[tuple[int, int]]:
    """Return (our block, decode's block): decode names only what it lacks, the tail of the prompt.

    Raises:
        TransferError: decode wants more blocks than the prompt has.
    """
    if len(theirs) > len(ours):
        raise TransferError(f"decode wants {len(theirs)} blocks of a prompt of {len(ours)}")
    return list(zip(ours[len(ours) - len(theirs) :], theirs, strict=True))


def completion_notice(request_id: str, producer_tp: int) -> bytes:
    """Return what travels with a stage's one WRITE; `request_id` is decode's, in full."""
    check(producer_tp >= 1, "a producer has at least one rank", producer_tp=producer_tp)
    return f"{request_id}:{producer_tp}".encode()


def parse_completion(notification: bytes) -> tuple[str, int]:
    """Return (request id, ranks) of a completion notice, in push or pull.

    Raises:
        TransferError: not a completion notice.
    """
    request_id, colon, count = notification.rpartition(b":")
    if not (request_id and colon and count.isdigit() and len(count) <= 4 and int(count) >= 1):
        raise TransferError("the notification is not a completion notice")
    try:
        return request_id.decode(), int(count)
    except UnicodeDecodeError as error:
        raise TransferError("the notification's request id is not text") from error


def completions_expected(pp_size: int, producer_tp: int, decode_tp: int) -> int:
    """Return after how many notices one decode rank goes on."""
    return pp_size * max(1, producer_tp // decode_tp)


def _decode(
    decoder: msgspec.msgpack.Decoder[T], frame: bytes | memoryview, bytes_max: int, what: str
) -> T:
    if len(frame) > bytes_max:
        raise TransferError(f"{what} of {len(frame)} bytes exceeds {bytes_max}")
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TransferError(f"malformed {what}: {error}") from error


def _check_metadata(metadata: AgentMetadata) -> None:
    """Raise `TransferError` unless every list has an entry for each region."""
    regions = len(metadata.kv_caches_base_addr)
    required = (metadata.block_lens, metadata.block_strides)
    optional: tuple[Sequence[object], ...] = (
        metadata.region_num_blocks,
        metadata.region_group_ids,
        metadata.region_names,
        metadata.region_mem_types,
    )
    if any(len(values) != regions for values in required) or any(
        values and len(values) != regions for values in optional
    ):
        raise TransferError(f"the metadata's lists do not all describe {regions} regions")
    if len(set(metadata.region_names)) != len(metadata.region_names):
        raise TransferError("the metadata name a region twice")
    if any(s < n for n, s in zip(metadata.block_lens, metadata.block_strides, strict=True)):
        raise TransferError("the metadata's blocks overlap")
