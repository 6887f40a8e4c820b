"""Changes to a plain configuration tree before it is converted: merges and `path=value` overrides.

Trees are the dicts, lists and scalars that YAML and JSON give.  Nothing here knows the schema;
whatever is merged goes through the same validation as the file it changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from wavepp_worker.base.errors import ConfigError

Tree = dict[str, Any]
Path = tuple[str, ...]

# Below these keys the names and values belong to the user: spelling and type stay as written.
VERBATIM = "envs"


def snake(key: str) -> str:
    """Return the key as the schema spells it: `block-tokens` and `block_tokens` are one key."""
    return key.replace("-", "_")


def merge(base: Mapping[str, Any], update: Mapping[str, Any]) -> Tree:
    """Return `base` with `update` laid over it: mappings merge key by key, all else is replaced."""
    merged = dict(base)
    for key, value in update.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = merge(old, value) if both else value  # type: ignore[arg-type]
    return merged


def parse_value(text: str) -> Any:
    """Return the value that `text` writes: JSON if it is JSON, `true`-like words, else itself."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return {"true": True, "false": False, "none": None}.get(text.lower(), text)


def parse_path(text: str) -> Path:
    """Return the parts of a dotted path, in the schema's spelling.

    Raises:
        ConfigError: a part is empty.
    """
    parts = tuple(part.strip() for part in text.split("."))
    if not all(parts):
        raise ConfigError(
            f'override "{text}": a path is names joined by dots, as in cache.block_tokens'
        )
    keep = parts.index(VERBATIM) + 1 if VERBATIM in parts else len(parts)
    return tuple(snake(part) for part in parts[:keep]) + parts[keep:]


def parse_override(text: str) -> tuple[Path, Any]:
    """Return (path, value) of one `path=value`.

    Raises:
        ConfigError: there is no `=`, or the path is malformed.
    """
    name, separator, value = text.partition("=")
    if not separator:
        raise ConfigError(f'override "{text}": expected path=value, as in cache.block_tokens=32')
    path = parse_path(name.strip())
    return path, value.strip() if VERBATIM in path[:-1] else parse_value(value.strip())


def override_tree(overrides: Iterable[tuple[Path, Any]]) -> Tree:
    """Return one tree that holds all overrides; a later one wins."""
    tree: Tree = {}
    for path, value in overrides:
        branch: Any = value
        for part in reversed(path):
            branch = {part: branch}
        tree = merge(tree, branch)
    return tree
