"""Make tests/data/crds from upstream's files: one schema version each, without descriptions.

    python tools/strip_crds.py DYNAMOGRAPHDEPLOYMENTS.yaml PODMONITOR_V1.json

The sources are named in tests/data/crds/README.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

TARGET = Path(__file__).resolve().parents[1] / "tests" / "data" / "crds"


def stripped(node: Any) -> Any:
    """Return a schema without its texts, which are nine tenths of it."""
    if isinstance(node, dict):
        return {
            key: stripped(value)
            for key, value in node.items()
            if not (key == "description" and isinstance(value, str))
        }
    return [stripped(item) for item in node] if isinstance(node, list) else node


def write(name: str, schema: Any) -> None:
    """Write one schema, indented, so that a refresh is a readable diff."""
    text = json.dumps(stripped(schema), sort_keys=True, indent=1)
    (TARGET / name).write_text(text + "\n")


def main(graphs: str, monitor: str) -> None:
    """Write both schemas."""
    definition = yaml.load(Path(graphs).read_text(), Loader=yaml.CSafeLoader)
    versions = {version["name"]: version for version in definition["spec"]["versions"]}
    write("dynamographdeployment_v1beta1.json", versions["v1beta1"]["schema"]["openAPIV3Schema"])
    write("podmonitor_v1.json", json.loads(Path(monitor).read_text()))


if __name__ == "__main__":
    main(*sys.argv[1:])
