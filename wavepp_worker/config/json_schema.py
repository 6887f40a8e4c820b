"""JSON schemas of configuration files, for editors and for review of changed knobs.

Field descriptions come from the strings below the fields in the schema's source, so that the
text an operator sees in an editor is the text a developer reads in the code.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from wavepp_worker.config.schema import Config

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def worker_schema() -> dict[str, Any]:
    """Return the schema of a plain prefill-worker file (`Config`)."""
    (top,), components = _components([Config])
    return {
        "$schema": DIALECT,
        "title": "WavePP prefill worker",
        **components.pop(top),
        "$defs": components,
    }


def graph_schema(
    components: Mapping[str, type[Struct]], args: type[Struct], dynamo: type[Struct]
) -> dict[str, Any]:
    """Return the schema of a graph file: one section per component, `Common` and `Dynamo`.

    Nothing is required, because a file may be an overlay and `Common` may supply any key.

    Args:
        components: section name → type of its settings.
        args: type of `ServiceArgs`.
        dynamo: type of the `Dynamo` section.
    """
    names, definitions = _components([*components.values(), args, dynamo])
    for definition in definitions.values():
        definition.pop("required", None)
    *section_names, args_name, dynamo_name = names
    sections: dict[str, Any] = {
        "Common": {
            "type": "object",
            "description": "Keys that components may subscribe to with `common-configs`.",
        },
        "Dynamo": {"$ref": f"#/$defs/{dynamo_name}"},
    }
    for name, struct_name in zip(components, section_names, strict=True):
        settings = definitions[struct_name]
        sections[name] = {
            **settings,
            "properties": {
                **settings["properties"],
                "ServiceArgs": {"$ref": f"#/$defs/{args_name}"},
                "common-configs": {
                    "type": "array",
                    "items": {"type": "string"},
                    "description": "Top-level keys of `Common` that this component takes over.",
                },
            },
        }
    for struct_name in section_names:
        definitions.pop(struct_name, None)
    return {
        "$schema": DIALECT,
        "title": "WavePP graph",
        "type": "object",
        "properties": sections,
        "additionalProperties": False,
        "$defs": definitions,
    }


def render(schema: Mapping[str, Any]) -> str:
    """Return the text of a schema file: indented JSON in a stable order, newline at the end."""
    return msgspec.json.format(msgspec.json.encode(schema), indent=2).decode() + "\n"


def _components(types: list[type[Struct]]) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Return the names of `types` and every struct's schema, with field descriptions."""
    references, schemas = msgspec.json.schema_components(types, ref_template="#/$defs/{name}")
    for struct in _structs(types):
        for field, text in field_texts(struct).items():
            schemas[struct.__name__]["properties"][field]["description"] = text
    return [reference["$ref"].rpartition("/")[2] for reference in references], dict(schemas)


def _structs(types: list[type[Struct]]) -> list[type[Struct]]:
    """Return the struct types in `types` and, recursively, in their fields."""
    found: list[type[Struct]] = []
    queue = list(types)
    while queue:
        struct = queue.pop(0)
        if struct not in found:
            found.append(struct)
            nested = (field.type for field in msgspec.structs.fields(struct))
            queue += [t for t in nested if isinstance(t, type) and issubclass(t, Struct)]
    return found


def field_texts(struct: type[Struct]) -> dict[str, str]:
    """Return field → the string below it in the source, as one line."""
    source = textwrap.dedent(inspect.getsource(struct))
    body = ast.parse(source).body[0]
    texts = {}
    statements = body.body if isinstance(body, ast.ClassDef) else []
    for field, below in itertools.pairwise(statements):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            texts[field.target.id] = " ".join(str(below.value.value).split())
    return texts
