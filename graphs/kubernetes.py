"""A deployment → Kubernetes objects for Dynamo's operator.  Pure: no cluster, no files, no clock.

    Deployment ──▶ DynamoGraphDeployment   a component each: Frontend, prefill, decode
                   ConfigMap               each worker's settings, where they differ from defaults
                   ConfigMap               the Grafana dashboard
                   PodMonitor              on request; the platform chart has its own

One prefill worker is one pod with one container: its P stages are processes of that container,
and its serving process alone is known to Dynamo.  What the operator sets by itself is left to it:
namespace, discovery, health port, names of the pod, service account, the frontend's probes.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from graphs.deployment import ARGS, Deployment
from graphs.graph import Component, Pod, ServiceArgs, Settings
from wavepp_worker.base.errors import ConfigError

DYNAMO_VERSION = "1.6.1"  # the packaged one; the operator chooses its behaviour by it
FRONTEND_IMAGE = f"nvcr.io/nvidia/ai-dynamo/dynamo-frontend:{DYNAMO_VERSION}"
CONFIG_FOLDER, CONFIG_VOLUME = "/etc/wavepp", "wavepp-config"
MODELS_FOLDER, MODELS_VOLUME = "/models", "models"
CONFIG_HASH = "wavepp/config-sha256"  # a changed configuration replaces the pods
GRAPH_LABEL = "nvidia.com/dynamo-graph-deployment-name"

SYSTEM_PORT_NAME, HTTP_PORT_NAME = "system", "http"  # container ports that the operator adds
LIVE_PATH, HEALTH_PATH, METRICS_PATH = "/live", "/health", "/metrics"
PROBE_PERIOD_S = 10
PROBE_MARGIN_S = 60  # a worker that gives up by itself says why; the kubelet comes after it

GRACE_S = 5  # Dynamo serves on for so long after it left discovery
DRAIN_RESERVE_S = 5  # Dynamo's share of the drain time for what follows the drain
STOP_MARGIN_S = 15  # over both: ranks stop, the runtime closes

# The operator sets these; a value of ours would cut a worker off from the rest of its graph.
OPERATOR_VARIABLES = (
    "DYN_NAMESPACE", "DYN_NAMESPACE_WORKER_SUFFIX", "DYN_NAMESPACE_PREFIX", "DYN_COMPONENT",
    "DYN_DISCOVERY_BACKEND", "DYN_SYSTEM_PORT", "DYN_SYSTEM_HOST", "DYN_HTTP_PORT",
    "POD_NAME", "POD_NAMESPACE", "POD_UID", "POD_IP",
)  # fmt: skip
ENV = {
    "DYN_LOG": "warn,engine=info,supervisor=info",  # Dynamo logs every request at info
    "HF_HUB_OFFLINE": "1",  # models are folders; nothing is downloaded while serving
    "OMP_NUM_THREADS": "1",  # each stage sets its own number
    "PYTHONUNBUFFERED": "1",
}
# DNS label; the operator joins it with the components' names, all of which have to fit in 63.
NAME = re.compile(r"[a-z]([-a-z0-9]{0,28}[a-z0-9])?")

Object = dict[str, Any]


class Choices(Struct, frozen=True, kw_only=True):
    """What the command line adds to a configuration.  Empty text: not chosen."""

    image: str
    name: str = "wavepp"
    namespace: str = ""
    frontend_image: str = FRONTEND_IMAGE
    model_claim: str = ""  # PersistentVolumeClaim with the model folders
    service_account: str = ""
    pull_secret: str = ""
    shared_memory: str = "8Gi"
    drain_s: int = 120
    pod_monitor: bool = False


def manifests(deployment: Deployment, choices: Choices, dashboard: str = "") -> dict[str, Object]:
    """Return the objects by file name, in the order in which they are applied.

    Args:
        dashboard: JSON text of the Grafana dashboard; empty: leave it out.

    Raises:
        ConfigError: the deployment or a choice cannot work in a cluster.
    """
    if not NAME.fullmatch(choices.name):
        raise ConfigError(
            f'--name "{choices.name}": at most 30 of a-z, 0-9 and "-", beginning with a letter'
        )
    parts = [_part(deployment, component, choices) for component in deployment.graph.components]
    config = {
        f"{part.component.name}.json": _settings_text(part.settings)
        for part in parts
        if part.pod.kind != "frontend"
    }
    objects = {
        "config.yaml": _object("v1", "ConfigMap", choices, "-config", data=config),
        "graph.yaml": _graph(deployment, choices, reversed(parts)),  # the frontend first, to read
    }
    if choices.pod_monitor:
        objects["podmonitor.yaml"] = _pod_monitor(choices)
    if dashboard:
        labels = {"grafana_dashboard": "1"}
        objects["dashboard.yaml"] = _object(
            "v1", "ConfigMap", choices, "-dashboard", labels, data={"wavepp.json": dashboard}
        )
    return objects


def kustomization(objects: Mapping[str, Object]) -> Object:
    """Return the kustomize file of a folder with these objects."""
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": list(objects),
    }


class _Part(Struct, frozen=True, kw_only=True):
    """One component as it runs in the cluster."""

    component: Component
    args: ServiceArgs
    pod: Pod
    settings: Settings


def _part(deployment: Deployment, component: Component, choices: Choices) -> _Part:
    settings, args = deployment.settings[component.name], deployment.args[component.name]
    if component.pod is None:
        raise ConfigError(f"{component.name}: does not say how it runs in a cluster (`pod`)")
    for name in OPERATOR_VARIABLES:
        if name in args.envs:
            raise ConfigError(
                f"{component.name}.{ARGS}.envs.{name}: Dynamo's operator sets it in a cluster; "
                "keep it in an overlay for local starts"
            )
    pod = component.pod(settings)
    if choices.drain_s < pod.drain_s + DRAIN_RESERVE_S:
        raise ConfigError(
            f"--drain-s {choices.drain_s}: {component.name} keeps finished prompts for their "
            f"readers for {pod.drain_s:g} s; at least "
            f"{math.ceil(pod.drain_s) + DRAIN_RESERVE_S} is needed"
        )
    settings = _with_model_path(component.name, pod.settings, choices.model_claim)
    return _Part(component=component, args=args, pod=pod, settings=settings)


def _with_model_path(name: str, settings: Settings, claim: str) -> Settings:
    """Return the settings with the model's folder where the pod sees it."""
    model = getattr(settings, "model", None)
    if model is None:
        return settings
    folder = model.path.rstrip("/")
    if claim:
        path = f"{MODELS_FOLDER}/{folder.rpartition('/')[2]}"
        model = msgspec.structs.replace(model, path=path)
        return msgspec.structs.replace(settings, model=model)
    if not folder.startswith("/"):
        raise ConfigError(
            f"{name}.model.path ({model.path}): not a path in a container; give --model-claim "
            "with the name of a volume claim that holds the folder, or an absolute path"
        )
    return settings


def _graph(deployment: Deployment, choices: Choices, parts: Iterable[_Part]) -> Object:
    dynamo = deployment.dynamo
    annotations = {}
    if dynamo.discovery_backend == "etcd":
        annotations["nvidia.com/dynamo-discovery-backend"] = "etcd"
    if choices.pod_monitor:  # else every sample would be there twice
        annotations["nvidia.com/enable-metrics"] = "false"
    env = {
        **ENV,
        "DYN_REQUEST_PLANE": dynamo.request_plane,
        "DYN_EVENT_PLANE": dynamo.event_plane,
        **({"ETCD_ENDPOINTS": dynamo.etcd_endpoints} if dynamo.etcd_endpoints else {}),
        **({"NATS_SERVER": dynamo.nats_server} if dynamo.nats_server else {}),
    }
    # No backendFramework: it knows three names, none of them ours, and then touches nothing.
    spec = {"env": _env(env), "components": [_component(part, choices) for part in parts]}
    graph = _object("nvidia.com/v1beta1", "DynamoGraphDeployment", choices, spec=spec)
    if annotations:
        graph["metadata"]["annotations"] = annotations
    return graph


def _component(part: _Part, choices: Choices) -> Object:
    pod, is_frontend = part.pod, part.pod.kind == "frontend"
    component: Object = {
        "name": pod.name,
        "type": pod.kind,
        "replicas": part.args.workers,
        "runtimeVersionOverride": DYNAMO_VERSION,
    }
    if not is_frontend:
        component["sharedMemorySize"] = choices.shared_memory
    template: Object = {}
    if not is_frontend:
        digest = hashlib.sha256(_settings_text(part.settings).encode()).hexdigest()
        template["metadata"] = {"annotations": {CONFIG_HASH: digest}}
    template["spec"] = _pod_spec(part, choices)
    return {**component, "podTemplate": template}


def _pod_spec(part: _Part, choices: Choices) -> Object:
    spec: Object = {
        "terminationGracePeriodSeconds": stop_s(part.pod, choices),
        # fsGroup is the operator's default, which it drops when anything is set here.
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000},
        "containers": [_main(part, choices)],
        "volumes": [volume for volume, _ in _volumes(part, choices)],
    }
    if not spec["volumes"]:
        del spec["volumes"]
    if choices.service_account:
        spec["serviceAccountName"] = choices.service_account
    if choices.pull_secret:
        spec["imagePullSecrets"] = [{"name": choices.pull_secret}]
    return spec


def stop_s(pod: Pod, choices: Choices) -> int:
    """Return how long a pod's stop may take: the sum of all that Dynamo waits for, and a margin.

    Grace, then the drain of hand-offs (prefill alone), then requests in flight (workers).
    """
    waits = {"frontend": 0, "decode": 1, "prefill": 2}[pod.kind]
    return GRACE_S + waits * choices.drain_s + STOP_MARGIN_S


def _main(part: _Part, choices: Choices) -> Object:
    component, pod = part.component, part.pod
    file = f"{CONFIG_FOLDER}/{component.name}.json"
    arguments = (*component.arguments(part.settings, file), *pod.arguments)
    env = {"DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": str(GRACE_S)}
    if pod.kind == "prefill":
        env["DYN_PREFILL_DRAIN_TIMEOUT_S"] = str(choices.drain_s)
    if pod.kind != "frontend":
        # How long Dynamo's runtime waits for requests in flight; its own 900 s outlive the pod.
        env["DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS"] = str(choices.drain_s)
    container: Object = {
        "name": "main",
        "image": choices.frontend_image if pod.kind == "frontend" else choices.image,
        "command": ["python3", "-m", component.module],
        "args": list(arguments),
        "env": _env({**env, **part.args.envs}),
        "resources": _resources(pod, part.args),
        "securityContext": {"allowPrivilegeEscalation": False},
    }
    if any("$(POD_IP)" in argument for argument in arguments):
        pod_ip = {"fieldRef": {"fieldPath": "status.podIP"}}
        container["env"].append({"name": "POD_IP", "valueFrom": pod_ip})
    if mounts := [mount for _, mount in _volumes(part, choices)]:
        container["volumeMounts"] = mounts
    if pod.kind != "frontend":
        container |= _probes(pod)
    return container


def _probes(pod: Pod) -> Object:
    """Return probes that come after the worker's own alarms and never before.

    A worker that hangs ends itself and says why; a busy one may be slow to answer once.
    """

    def probe(path: str, period_s: int, patience_s: float) -> Object:
        return {
            "httpGet": {"path": path, "port": SYSTEM_PORT_NAME},
            "periodSeconds": period_s,
            "timeoutSeconds": min(5, period_s),
            "failureThreshold": math.ceil(patience_s / period_s),
        }

    return {
        "startupProbe": probe(LIVE_PATH, PROBE_PERIOD_S, pod.start_s + PROBE_MARGIN_S),
        "livenessProbe": probe(LIVE_PATH, PROBE_PERIOD_S, pod.silence_s + PROBE_MARGIN_S),
        "readinessProbe": probe(HEALTH_PATH, 5, 15),
    }


def _resources(pod: Pod, args: ServiceArgs) -> Object:
    """Return requests and limits: what the configuration says, else what the processes open."""
    gpus = args.resources.gpu or pod.gpus
    amounts = {
        "nvidia.com/gpu": str(gpus or ""),
        "cpu": args.resources.cpu,
        "memory": args.resources.memory,
    }
    limits = {name: amount for name, amount in amounts.items() if amount}
    requests = {"cpu": str(pod.cpus), **limits}
    return {"requests": requests, **({"limits": limits} if limits else {})}


def _volumes(part: _Part, choices: Choices) -> list[tuple[Object, Object]]:
    """Return (volume, where it is mounted) of a pod.

    The frontend reads the tokenizer from the same path as the workers, so it has the models too.
    """
    found: list[tuple[Object, Object]] = []
    if part.pod.kind != "frontend":
        volume = {"name": CONFIG_VOLUME, "configMap": {"name": f"{choices.name}-config"}}
        mount = {"name": CONFIG_VOLUME, "mountPath": CONFIG_FOLDER, "readOnly": True}
        found.append((volume, mount))
    if choices.model_claim:
        claim = {"claimName": choices.model_claim, "readOnly": True}
        volume = {"name": MODELS_VOLUME, "persistentVolumeClaim": claim}
        mount = {"name": MODELS_VOLUME, "mountPath": MODELS_FOLDER, "readOnly": True}
        found.append((volume, mount))
    return found


def _pod_monitor(choices: Choices) -> Object:
    def endpoint(port: str) -> Object:  # a pod without this port is no target
        return {"port": port, "path": METRICS_PATH, "interval": "5s"}

    spec = {
        "selector": {"matchLabels": {GRAPH_LABEL: choices.name}},
        "podMetricsEndpoints": [endpoint(SYSTEM_PORT_NAME), endpoint(HTTP_PORT_NAME)],
    }
    return _object("monitoring.coreos.com/v1", "PodMonitor", choices, spec=spec)


def _object(
    version: str,
    kind: str,
    choices: Choices,
    suffix: str = "",
    labels: Mapping[str, str] | None = None,
    **body: Any,
) -> Object:
    metadata: Object = {"name": choices.name + suffix}
    if choices.namespace:
        metadata["namespace"] = choices.namespace
    metadata["labels"] = {"app.kubernetes.io/part-of": choices.name, **(labels or {})}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **body}


def _env(values: Mapping[str, str]) -> list[Object]:
    return [{"name": name, "value": value} for name, value in values.items()]


def _settings_text(settings: Settings) -> str:
    """Return a worker's settings as JSON, without what is a default anyway."""
    text = msgspec.json.format(msgspec.json.encode(_chosen(settings)), indent=2)
    return text.decode() + "\n"


def _chosen(settings: Struct) -> dict[str, Any]:
    """Return the keys whose values differ from their defaults, section by section."""
    chosen: dict[str, Any] = {}
    for info in msgspec.structs.fields(settings):
        value = getattr(settings, info.name)
        if isinstance(value, Struct):
            if below := _chosen(value):
                chosen[info.encode_name] = below
        elif info.required or value != info.default:
            chosen[info.encode_name] = msgspec.to_builtins(value)
    return chosen
