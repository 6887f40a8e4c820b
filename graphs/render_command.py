"""`wavepp render GRAPH -f FILE --kubernetes`: what `serve` would start, as manifests."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from graphs.deployment import deploy
from graphs.kubernetes import (
    DYNAMO_VERSION,
    FRONTEND_IMAGE,
    Choices,
    Object,
    kustomization,
    manifests,
)
from graphs.resolve import resolve
from wavepp_worker.base.errors import ConfigError
from wavepp_worker.config.load import merge_sources, read_override, read_source

DASHBOARD = Path(__file__).resolve().parents[1] / "configs" / "grafana" / "wavepp.json"
KUSTOMIZATION = "kustomization.yaml"
LINE_COLUMNS = 100

HELP = f"""\
Print a graph as Kubernetes manifests for Dynamo's operator (nvidia.com/v1beta1, Dynamo
{DYNAMO_VERSION}): a DynamoGraphDeployment, a ConfigMap with the workers' settings and one with the
Grafana dashboard.  With -o they become a kustomize folder.  Nothing is sent anywhere.

examples:
  %(prog)s graphs.disagg -f my.yaml --kubernetes --image registry.example/wavepp:0.1.0 \\
      --model-claim models | kubectl apply -n inference -f -
  %(prog)s graphs.disagg -f my.yaml --kubernetes --image registry.example/wavepp:0.1.0 \\
      --model-claim models --PrefillWorker.cluster.stages=8 -o deploy/ && kubectl apply -k deploy/
"""

EPILOG = """\
what becomes of the configuration:
  cluster.stages                  GPUs of the one prefill pod, unless cluster.devices are "cpu"
  ServiceArgs.workers             replicas
  ServiceArgs.resources           limits and requests (cpu: as in Kubernetes, "16" or "500m")
  ServiceArgs.envs                environment, but for what the operator sets itself
  Frontend.host, Frontend.port    always every address and 8000, as the operator expects
  Dynamo.discovery_backend        etcd stays etcd; all others become Kubernetes discovery
  Dynamo.namespace                left to the operator: {Kubernetes namespace}-{--name}
  model.path                      with --model-claim: the folder of that name in the claim

The operator creates the service account, Services and the frontend's probes.  Exit status: 0, or
2 when the configuration or an option is refused.
"""


def add_render(commands: Any) -> None:
    """Add `render` to the commands of `wavepp`."""
    parser = commands.add_parser(
        "render",
        help="print a graph as Kubernetes manifests",
        description=HELP,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="%(prog)s GRAPH [-f FILE ...] --kubernetes --image IMAGE [options] "
        "[--Service.path=val]",
    )
    add = parser.add_argument
    add("graph", metavar="GRAPH", help="module, module:Component or path/to/file.py[:Component]")
    add("-f", "--config-file", metavar="FILE", action="append", default=[], help="YAML; repeatable")
    add("--set", metavar="PATH=VALUE", action="append", default=[],
        help="change one key; repeatable")  # fmt: skip
    add("--working-dir", metavar="DIR", default=".", help="folder that GRAPH is imported from")
    add("--kubernetes", action="store_true", required=True, help="the one target there is")
    add("--image", required=True, help="of the workers: WavePP on one of Dynamo's runtime images")
    add("--frontend-image", metavar="IMAGE", default=FRONTEND_IMAGE, help="default: %(default)s")
    add("--name", default=Choices(image="").name, help="of the deployment; default: %(default)s")
    add("-n", "--namespace", default="", help="default: the one that is current when applied")
    add("--model-claim", metavar="CLAIM", default="",
        help="volume claim with model folders; read-only at /models in every pod")  # fmt: skip
    add("--service-account", metavar="NAME", default="",
        help="default: the operator's own; bind another to its Role")  # fmt: skip
    add("--pull-secret", metavar="NAME", default="", help="Secret of a private registry")
    add("--shared-memory", metavar="SIZE", default=Choices(image="").shared_memory,
        help="of /dev/shm in a worker; default: %(default)s")  # fmt: skip
    add("--drain-s", metavar="SECONDS", type=int, default=Choices(image="").drain_s,
        help="a stopping worker has so long to finish; default: %(default)s")  # fmt: skip
    add("--pod-monitor", action="store_true",
        help="also a PodMonitor, instead of those of Dynamo's platform chart")  # fmt: skip
    add("--dashboard", metavar="FILE", type=Path, help="default: the repository's own, if there")
    add("--no-dashboard", action="store_true", help="leave it out")
    add("--nodes", type=int, default=1, help="pods of one prefill worker; only 1 is supported")
    add("-o", "--output", metavar="FOLDER", type=Path,
        help="write a kustomize folder instead of printing")  # fmt: skip
    parser.set_defaults(run=_render)


def _render(args: argparse.Namespace) -> int:
    if args.nodes != 1:
        raise ConfigError(
            f"--nodes {args.nodes}: a prefill worker over several pods is not supported yet; use "
            "--nodes 1 and as many GPUs as stages"
        )
    graph = resolve(args.graph, Path(args.working_dir))
    source = merge_sources([read_source(file) for file in args.config_file])
    overrides = read_override([*args.set, *args.overrides])
    choices = Choices(
        image=args.image,
        name=args.name,
        namespace=args.namespace,
        frontend_image=args.frontend_image,
        model_claim=args.model_claim,
        service_account=args.service_account,
        pull_secret=args.pull_secret,
        shared_memory=args.shared_memory,
        drain_s=args.drain_s,
        pod_monitor=args.pod_monitor,
    )
    deployment = deploy(graph, overrides.over(source))
    objects = manifests(
        deployment, choices, "" if args.no_dashboard else _dashboard(args.dashboard)
    )
    if args.output:
        _write(args.output, objects)
    else:
        sys.stdout.write(to_yaml(*objects.values()))
    return os.EX_OK


def _dashboard(file: Path | None) -> str:
    if file is None and not DASHBOARD.exists():
        print("note: no dashboard: give its file with --dashboard", file=sys.stderr)
        return ""
    try:
        return (file or DASHBOARD).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dashboard {file}: {error}") from error


def _write(folder: Path, objects: dict[str, Object]) -> None:
    """Write a kustomize folder; files of other names in it are left alone."""
    files = {KUSTOMIZATION: kustomization(objects), **objects}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_text(to_yaml(content))
    except OSError as error:
        raise ConfigError(f"-o {folder}: {error.strerror}") from error
    print(f"{folder}: {' '.join(files)}", file=sys.stderr)


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # the library is untyped
    """Texts of several lines stay readable; no anchors."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def to_yaml(*documents: Object) -> str:
    """Return YAML documents with their keys in the order given."""
    parts: Sequence[str] = [
        yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=LINE_COLUMNS)
        for document in documents
    ]
    return "---\n".join(parts)
