"""Safetensors shards on disk: where each tensor lies, and whether the files are whole.

A shard is `u64 header length | JSON header | tensor bytes`, and the header gives every tensor's
byte range.  An interrupted download therefore shows without reading any weights: the file is
shorter than its header says.  No torch here, because the serving process checks folders too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from wavepp_worker.base.errors import ConfigError

INDEX_NAME: Final = "model.safetensors.index.json"
HEADER_BYTES_MAX: Final = 100_000_000  # the format's own limit
SAMPLE_BYTES: Final = 1024  # of each tensor, for the fingerprint
FLOAT_DTYPES: Final = ("F32", "BF16", "F16", "F64")


class TensorEntry(Struct, frozen=True):
    """One tensor: bytes [start, stop) of `shard`."""

    shard: Path
    name: str  # within the shard
    dtype: str  # safetensors name, e.g. "BF16"
    shape: tuple[int, ...]
    start: int
    stop: int


class _Header(Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_index(folder: Path) -> dict[str, TensorEntry]:
    """Return every tensor of the checkpoint in `folder`, after checking each shard's size.

    Raises:
        ConfigError: no weights, a shard missing, truncated or not safetensors.
    """
    index: dict[str, TensorEntry] = {}
    for shard in _shards(folder):
        index.update(_read_shard(shard))
    return index


def strip_prefix(index: Mapping[str, TensorEntry], prefix: str) -> dict[str, TensorEntry]:
    """Return the tensors under names without `prefix`; names that lack it stay."""
    return {name.removeprefix(prefix): entry for name, entry in index.items()}


def check_tensors(
    index: Mapping[str, TensorEntry],
    shapes: Mapping[str, tuple[int, ...]],
    may_be_longer: Callable[[str], bool] = lambda name: False,
) -> None:
    """Refuse a checkpoint that lacks a tensor of `shapes`, or has it in another shape or type.

    Args:
        may_be_longer: of a name: whether rows beyond the wanted ones are padding.

    Raises:
        ConfigError: names the first offending tensors.
    """
    missing = [name for name in shapes if name not in index]
    if missing:
        raise ConfigError(
            f"{_place(index)}: {len(missing)} of {len(shapes)} tensors are missing: "
            f"{_first(missing)}"
        )
    for name, shape in shapes.items():
        entry = index[name]
        is_longer = may_be_longer(name) and entry.shape[:1] > shape[:1]
        if (shape[:1] + entry.shape[1:] if is_longer else entry.shape) != shape:
            raise ConfigError(
                f"{entry.shard}: {name} has shape {list(entry.shape)}, "
                f"config.json asks for {list(shape)}"
            )
        if entry.dtype not in FLOAT_DTYPES:
            raise ConfigError(
                f"{entry.shard}: {name} has type {entry.dtype}; supported: "
                f"{', '.join(FLOAT_DTYPES)}"
            )


def weights_digest(index: Mapping[str, TensorEntry]) -> bytes:
    """Return a digest that tells two checkpoints of the same shapes apart.

    Covers names, types, shapes and `SAMPLE_BYTES` from the middle of every tensor: a fine-tune
    changes those, and reading them takes milliseconds where hashing all weights takes minutes.
    """
    digest = hashlib.sha256()
    ordered = sorted(index.items(), key=lambda item: (item[1].shard, item[1].start, item[0]))
    samples: dict[str, bytes] = {}
    handles: dict[Path, Any] = {}
    try:
        for name, entry in ordered:
            if entry.shard not in handles:
                handles[entry.shard] = entry.shard.open("rb")
            file = handles[entry.shard]
            file.seek(entry.start + max(0, entry.stop - entry.start - SAMPLE_BYTES) // 2)
            samples[name] = file.read(min(SAMPLE_BYTES, entry.stop - entry.start))
    finally:
        for file in handles.values():
            file.close()
    # In name order, so that the same weights cut into other shards have the same digest.
    for name in sorted(samples):
        entry = index[name]
        digest.update(f"{name}|{entry.dtype}|{entry.shape}|".encode())
        digest.update(samples[name])
    return digest.digest()


def _shards(folder: Path) -> list[Path]:
    index_path = folder / INDEX_NAME
    if index_path.is_file():
        try:
            tree = msgspec.json.decode(index_path.read_bytes(), type=dict[str, Any])
            names = sorted(set(msgspec.convert(tree["weight_map"], dict[str, str]).values()))
        except (msgspec.MsgspecError, KeyError) as error:
            raise ConfigError(f"{index_path}: no usable weight_map: {error}") from error
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ConfigError(
                f"{folder}: {len(missing)} of {len(names)} shards are missing: {_first(missing)}"
            )
        return [folder / name for name in names]
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise ConfigError(
            f"{folder}: no *.safetensors (model.load_format: dummy runs without weights)"
        )
    return shards


def _read_shard(path: Path) -> dict[str, TensorEntry]:
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if size < 8 or header_bytes > min(size - 8, HEADER_BYTES_MAX):
            raise ConfigError(f"{path}: truncated or not a safetensors file ({size} bytes)")
        try:
            tree = msgspec.json.decode(file.read(header_bytes), type=dict[str, Any])
            tree.pop("__metadata__", None)
            headers = msgspec.convert(tree, dict[str, _Header])
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path}: not a safetensors header: {error}") from error
    data = 8 + header_bytes
    whole = data + max((header.data_offsets[1] for header in headers.values()), default=0)
    if size != whole:
        state = "truncated" if size < whole else "longer than its header says"
        raise ConfigError(f"{path}: {state}: {size} of {whole} bytes; fetch the file again")
    return {
        name: TensorEntry(
            shard=path,
            name=name,
            dtype=header.dtype,
            shape=header.shape,
            start=data + header.data_offsets[0],
            stop=data + header.data_offsets[1],
        )
        for name, header in headers.items()
    }


def _place(index: Mapping[str, TensorEntry]) -> Path | str:
    return next((entry.shard.parent for entry in index.values()), "checkpoint")


def _first(names: Iterable[str], count: int = 3) -> str:
    listed = list(names)
    return ", ".join(listed[:count]) + (", ..." if len(listed) > count else "")
