"""YAML or JSON files → plain tree with origins → frozen sections; every error names file and path.

The one module of `config` that reads files.  A refusal lists all unknown keys at once, each with
its nearest known name, because the reader of a long file wants to mend it in one go.

    configs/a.yaml:12: PrefillWorker.cache.block_token: unknown key, did you mean "block_tokens"?
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml
from msgspec import Struct

from wavepp_worker.base.errors import ConfigError
from wavepp_worker.config.overrides import (
    VERBATIM,
    Tree,
    merge,
    override_tree,
    parse_override,
    snake,
)
from wavepp_worker.config.schema import Config, DecodeConfig

T = TypeVar("T")
KeyPath = tuple[str, ...]
DEPTH_MAX = 16  # of nested mappings; also ends a YAML document that refers to itself


class Source(Struct, frozen=True):
    """A plain tree and where each of its keys was written (`file:line`)."""

    tree: Tree
    origins: dict[KeyPath, str]

    def over(self, other: Source) -> Source:
        """Return this source laid over `other`."""
        return Source(merge(other.tree, self.tree), {**other.origins, **self.origins})

    def at(self, path: KeyPath) -> str:
        """Return the message prefix `file:line: path: ` of a key, or of its nearest parent."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return f"{self.origins[path[:length]]}: {'.'.join(path)}: "
        return f"{'.'.join(path)}: " if path else ""


def load_config(path: str | Path, sets: Iterable[str] = ()) -> Config:
    """Return the prefill worker's configuration in a YAML or JSON file, after `sets` (path=value).

    Raises:
        ConfigError: unreadable, or not a valid configuration; names the path in the file.
    """
    return convert(read_override(sets).over(read_source(path)), Config)


def load_decode_config(path: str | Path, sets: Iterable[str] = ()) -> DecodeConfig:
    """Return the decode worker's configuration in a file; errors as `load_config`."""
    return convert(read_override(sets).over(read_source(path)), DecodeConfig)


def read_source(path: str | Path) -> Source:
    """Read one YAML or JSON file.

    Raises:
        ConfigError: missing, unreadable or malformed.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{path}: cannot be read: {reason}") from error
    return parse_source(text, str(path))


def read_override(sets: Iterable[str]) -> Source:
    """Return `path=value` overrides as a source whose origin is the command line."""
    parsed = [parse_override(text) for text in sets]
    origins = {path: "command line" for path, _ in parsed}
    return Source(override_tree(parsed), origins)


def parse_source(text: str, name: str) -> Source:
    """Return the tree of a YAML text; `name` stands for the file in messages.

    Raises:
        ConfigError: not YAML, not a mapping at the top, a key that is no text or appears twice.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return Source({}, {})
        origins: dict[KeyPath, str] = {}
        tree = _plain(loader, node, (), name, origins)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {_one_line(error)}") from error
    finally:
        loader.dispose()
    if tree is None:  # an empty document
        return Source({}, {})
    if not isinstance(tree, dict):
        raise ConfigError(f"{name}: expected sections (key: value), got {type(tree).__name__}")
    return Source(tree, origins)


def merge_sources(sources: Sequence[Source]) -> Source:
    """Return the sources laid over one another in order: a later one wins."""
    merged = Source({}, {})
    for source in sources:
        merged = source.over(merged)
    return merged


def convert(source: Source, section_type: type[T], at: KeyPath = ()) -> T:
    """Return the branch `at` of a source as one typed section.

    Raises:
        ConfigError: unknown keys (all of them), a wrong type, a bad range or a broken relation.
    """
    branch: Any = source.tree
    for part in at:
        branch = branch.get(part, {}) if isinstance(branch, dict) else {}
    unknown = list(_unknown_keys(branch, section_type, at, source))
    if unknown:
        raise ConfigError("\n".join(unknown))
    try:
        return msgspec.convert(branch, section_type)
    except msgspec.ValidationError as error:
        text, path = _split_path(str(error))
        place = source.at((*at, *path))
        raise ConfigError(place + _plain_words(text, _type_at(section_type, path))) from error


def suggest(name: str, known: Iterable[str]) -> str:
    """Return ', did you mean "x"?' for the nearest known name, or a list of a few, or nothing."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if near:
        return f', did you mean "{near[0]}"?'
    return f" (known: {', '.join(names)})" if 0 < len(names) <= 12 else ""


def _unknown_keys(branch: Any, section: Any, at: KeyPath, source: Source) -> Iterable[str]:
    """Yield one line for each key below `branch` that `section` does not have."""
    struct = _struct_in(section)
    if struct is None or not isinstance(branch, Mapping):
        return
    fields = {field.encode_name: field.type for field in msgspec.structs.fields(struct)}
    for key, value in branch.items():
        if key in fields:
            yield from _unknown_keys(value, fields[key], (*at, key), source)
        else:
            yield f"{source.at((*at, key))}unknown key{suggest(key, fields)}"


def _struct_in(annotation: Any) -> type[Struct] | None:
    """Return the struct that an annotation means, looking into optional and annotated types."""
    if isinstance(annotation, type) and issubclass(annotation, Struct):
        return annotation
    if typing.get_origin(annotation) in (types.UnionType, typing.Union, typing.Annotated):
        found = (_struct_in(part) for part in typing.get_args(annotation))
        return next((struct for struct in found if struct is not None), None)
    return None


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """PyYAML's safe loader that also reads `1e-3` as a number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def _plain(
    loader: _Loader, node: yaml.Node, at: KeyPath, name: str, origins: dict[KeyPath, str]
) -> Any:
    """Return a node as plain data, with snake-case keys, and note where each key stands."""
    where = f"{name}:{node.start_mark.line + 1}"
    if len(at) > DEPTH_MAX:
        raise ConfigError(f"{where}: nested deeper than {DEPTH_MAX} levels")
    if not isinstance(node, yaml.MappingNode):
        return loader.construct_object(node, deep=True)
    own: set[str] = set()
    for key_node, _ in node.value:
        key = key_node.value if at[-1:] == (VERBATIM,) else snake(str(key_node.value))
        if key in own:
            line = key_node.start_mark.line + 1
            raise ConfigError(
                f"{name}:{line}: {'.'.join((*at, key))}: appears twice in this section"
            )
        own.add(key)
    loader.flatten_mapping(node)  # resolves YAML's `<<` merges; the section's own keys come last
    tree: Tree = {}
    for key_node, value_node in node.value:
        where = f"{name}:{key_node.start_mark.line + 1}"
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise ConfigError(
                f"{where}: {'.'.join((*at, repr(key)))}: keys must be text, so quote it"
            )
        path = (*at, key if at[-1:] == (VERBATIM,) else snake(key))
        origins[path] = where
        tree[path[-1]] = _plain(loader, value_node, path, name, origins)
    return tree


def _one_line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f"{problem} (line {mark.line + 1}, column {mark.column + 1})" if mark else str(problem)


def _split_path(message: str) -> tuple[str, KeyPath]:
    """Split msgspec's "text - at `$.a.b[0]`" into text and path."""
    text, separator, where = message.rpartition(" - at `$")
    if not separator:
        return message, ()
    return text, tuple(part for part in where.rstrip("`").lstrip(".").split(".") if part)


def _plain_words(text: str, wanted: Any) -> str:
    """Return msgspec's sentence in our words: "expected int >= 1, got str"."""
    missing = re.fullmatch(r"Object missing required field `(.+)`", text)
    if missing:
        return f'"{missing[1]}" is required here and has no default'
    text = text.replace("`", "")
    choices = ", ".join(map(str, typing.get_args(wanted)))
    if text.startswith("Invalid enum value") and choices:
        return f"must be one of {choices}; got {text.removeprefix('Invalid enum value ')}"
    return text[0].lower() + text[1:] if text.startswith("Expected") else text


def _type_at(section: Any, path: KeyPath) -> Any:
    """Return the annotation of the field at `path` below a struct; None when there is none."""
    for part in path:
        struct = _struct_in(section)
        fields = msgspec.structs.fields(struct) if struct is not None else ()
        section = next((field.type for field in fields if field.encode_name == part), None)
    return section
