"""What an API server with Dynamo's operator refuses on create, as far as it can be known offline.

Checked: the OpenAPI schema (closed objects), its CEL rules, Kubernetes' own Pod and ConfigMap
schemas, and the operator's admission rules that no schema shows.  Not checked: anything that needs
a cluster, such as quotas, conversion or the existence of what is referred to.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import celpy
import jsonschema
import kubernetes_validate

CRDS = Path(__file__).resolve().parents[2] / "data" / "crds"
KUBERNETES = "1.30"  # the oldest that Dynamo's charts accept
SEMANTIC_VERSION = re.compile(r"\d+\.\d+\.\d+([-+][0-9A-Za-z.+-]+)?")
SCHEMAS = {
    "DynamoGraphDeployment": "dynamographdeployment_v1beta1.json",
    "PodMonitor": "podmonitor_v1.json",
}
VERSIONS = {
    "DynamoGraphDeployment": "nvidia.com/v1beta1",
    "PodMonitor": "monitoring.coreos.com/v1",
    "ConfigMap": "v1",
}


def complaints(manifest: dict[str, Any]) -> list[str]:
    """Return why `manifest` would be refused; empty: it would not."""
    kind = manifest["kind"]
    if manifest["apiVersion"] != VERSIONS[kind]:
        return [f"{kind}: not {manifest['apiVersion']}"]
    if kind not in SCHEMAS:
        return list(_built_in(manifest))
    found = [
        f"{'/'.join(map(str, error.absolute_path))}: {error.message}"
        for error in _validator(SCHEMAS[kind]).iter_errors(manifest)
    ]
    if found or kind != "DynamoGraphDeployment":
        return found
    found += _broken_rules(_schema(SCHEMAS[kind]), manifest, "")
    found += _not_admitted(manifest["spec"])
    for component in manifest["spec"]["components"]:
        pod = {"apiVersion": "v1", "kind": "Pod", **component["podTemplate"]}
        found += (f"{component['name']}: {text}" for text in _built_in(pod))
    return found


def _built_in(manifest: dict[str, Any]) -> Iterator[str]:
    try:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        yield f"{manifest['kind']}: {error.message}"


@functools.cache
def _schema(name: str) -> dict[str, Any]:
    schema: dict[str, Any] = json.loads((CRDS / name).read_text())
    return schema


@functools.cache
def _validator(name: str) -> Any:
    return jsonschema.Draft202012Validator(_json_schema(_schema(name)))


def _json_schema(node: Any) -> Any:
    """Return a structural schema as JSON Schema that refuses unknown fields and nulls."""
    if isinstance(node, list):
        return [_json_schema(item) for item in node]
    if not isinstance(node, dict):
        return node
    schema = {key: _json_schema(value) for key, value in node.items() if key != "nullable"}
    if schema.get("x-kubernetes-int-or-string") is True:
        schema["type"] = ["integer", "string"]
    is_open = node.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in node
    if node.get("type") == "object" and isinstance(node.get("properties"), dict) and not is_open:
        schema["additionalProperties"] = False
    return schema


def _broken_rules(schema: dict[str, Any], value: Any, path: str) -> Iterator[str]:
    """Yield the CEL rules that `value`, or anything in it, breaks when it is created."""
    for rule in schema.get("x-kubernetes-validations", []):
        is_transition = "oldSelf" in rule["rule"] and not rule.get("optionalOldSelf")
        if not is_transition and not _program(rule["rule"]).evaluate(
            {"self": celpy.json_to_cel(value), "oldSelf": celpy.json_to_cel({})}
        ):
            yield f"{path}: {rule['message']}"
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _broken_rules(schema.get("items", {}), item, f"{path}/{index}")
    elif isinstance(value, dict):
        others = schema.get("additionalProperties")
        for key, item in value.items():
            below = schema.get("properties", {}).get(key, others)
            if isinstance(below, dict):
                yield from _broken_rules(below, item, f"{path}/{key}")


@functools.cache
def _program(rule: str) -> Any:
    environment = celpy.Environment()
    functions = {  # of Kubernetes, unknown to the library
        "lowerAscii": lambda text: celpy.celtypes.StringType(text.lower()),
        "hasValue": lambda _old: celpy.celtypes.BoolType(False),  # nothing is there on create
    }
    return environment.program(environment.compile(rule), functions=functions)


def _not_admitted(spec: dict[str, Any]) -> Iterator[str]:
    """Yield what the operator's webhook refuses beyond schema and rules."""
    if not spec.get("components"):
        yield "no component"
    for component in spec.get("components", []):
        name = component["name"]
        containers = component["podTemplate"]["spec"]["containers"]
        main = [container for container in containers if container["name"] == "main"]
        if not (main and main[0].get("image")):
            yield f"{name}: no container main with an image"
            continue
        tag = main[0]["image"].rpartition("/")[2].partition(":")[2]
        version = component.get("runtimeVersionOverride", "")
        if not (SEMANTIC_VERSION.fullmatch(version) or SEMANTIC_VERSION.fullmatch(tag)):
            yield f"{name}: runtimeVersionOverride is needed for the image's tag"
        sidecar = component.get("frontendSidecar")
        if sidecar and sidecar not in {container["name"] for container in containers}:
            yield f"{name}: frontendSidecar names no container"
        if "minAvailable" in component:
            yield f"{name}: minAvailable needs Grove"
    if "priorityClassName" in spec:
        yield "priorityClassName needs Grove"
