"""A graph + a configuration → typed settings per component, and one plan per process.  No I/O.

The configuration has one section per component, named like it, in the habits of Dynamo 0.3:

    Common:                      keys that components may share
      model: {path: ~/models/m}
    Dynamo:                      planes and discovery of every process
      discovery_backend: file
    PrefillWorker:
      common-configs: [model]    taken over unless the component sets them itself
      cache: {block_tokens: 64}
      ServiceArgs: {workers: 2, resources: {gpu: 4}, envs: {KEY: value}}
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from graphs.graph import Component, Graph, ServiceArgs, Settings
from wavepp_worker.base.errors import ConfigError
from wavepp_worker.config.load import Source, convert, suggest
from wavepp_worker.config.overrides import merge, snake
from wavepp_worker.config.schema import DynamoConfig

COMMON, DYNAMO = "Common", "Dynamo"
ARGS, SUBSCRIPTION = "ServiceArgs", "common_configs"
SYSTEM_PORT = "DYN_SYSTEM_PORT"  # Dynamo's variable: /health, /metrics, /engine/control
SYSTEM_PORT_MAX = (1 << 15) - 1  # Dynamo reads it as a 16-bit signed number

# Set unless the user's environment says otherwise.
ENV_DEFAULTS = {
    "OMP_NUM_THREADS": "1",  # threads of several processes on few cores wait for one another
    "HF_HUB_OFFLINE": "1",  # models are folders; nothing is downloaded while serving
    "DYN_LOG": "warn,engine=info,supervisor=info",  # Dynamo logs every request at info
    "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "1",  # nobody balances load over a local graph
    "DYN_PREFILL_DRAIN_TIMEOUT_S": "10",
}
# File discovery is one host, so nothing needs to listen beyond it.
ENV_ONE_HOST = {
    "DYN_TCP_RPC_HOST": "127.0.0.1",
    "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
    "DYN_EVENT_PLANE_HOST": "127.0.0.1",
}


class Folders(Struct, frozen=True):
    """Paths in the graph's private folder."""

    config: str
    store: str
    temporary: str


class ProcessPlan(Struct, frozen=True, kw_only=True):
    """One process to start."""

    name: str  # of the component, with a number when it has several processes
    component: Component
    command: tuple[str, ...]
    env: dict[str, str]  # over the launcher's own environment
    system_port: int  # Dynamo's health server; 0: none


class Deployment(Struct, frozen=True, kw_only=True):
    """A graph with its validated settings."""

    graph: Graph
    dynamo: DynamoConfig
    settings: dict[str, Settings]
    args: dict[str, ServiceArgs]

    def resolved(self) -> dict[str, Any]:
        """Return the whole configuration, defaults included, in the form of a graph file."""
        tree: dict[str, Any] = {DYNAMO: msgspec.to_builtins(self.dynamo)}
        for name, settings in self.settings.items():
            args = msgspec.to_builtins(self.args[name])
            tree[name] = {**msgspec.to_builtins(settings), ARGS: args}
        return tree

    def frontend(self) -> tuple[str, int] | None:
        """Return (host, port) of the OpenAI API, if the graph has one."""
        for component in self.graph.components:
            if component.is_frontend:
                return component.address(self.settings[component.name])
        return None

    def model_names(self) -> tuple[str, ...]:
        """Return the names that `/v1/models` must list."""
        names = (c.model_name(self.settings[c.name]) for c in self.graph.components)
        return tuple(dict.fromkeys(name for name in names if name))


def deploy(graph: Graph, source: Source) -> Deployment:
    """Return the deployment that a configuration describes.

    Raises:
        ConfigError: unknown section or key, wrong type, or settings that cannot work together.
    """
    known = {COMMON, DYNAMO, *graph.section_names}
    complaints = [
        f"{source.at((name,))}unknown section{suggest(name, known)}"
        for name in source.tree
        if name not in known
    ]
    complaints += [
        f"{source.at((name,))}expected keys below it, got {section!r}"
        for name, section in source.tree.items()
        if name in known and not isinstance(section, dict | None)
    ]
    if complaints:
        raise ConfigError("\n".join(complaints))
    settings: dict[str, Settings] = {}
    args: dict[str, ServiceArgs] = {}
    for component in reversed(graph.components):
        try:
            args[component.name], own = _component(component, source)
            if own is not None:
                settings[component.name] = own
        except ConfigError as error:
            complaints.append(str(error))
    dynamo = DynamoConfig()
    try:
        dynamo = _dynamo(source)
    except ConfigError as error:
        complaints.append(str(error))
    if complaints:
        raise ConfigError("\n".join(complaints))
    graph.relate(settings, args)
    running = tuple(c for c in graph.components if c.name in settings)
    graph = msgspec.structs.replace(graph, components=running)
    return Deployment(graph=graph, dynamo=dynamo, settings=settings, args=args)


def _dynamo(source: Source) -> DynamoConfig:
    dynamo = convert(source, DynamoConfig, (DYNAMO,))
    if dynamo.discovery_backend == "mem":
        raise ConfigError(
            f'{source.at((DYNAMO, "discovery_backend"))}"mem" is seen by one process only; '
            "use file, etcd or kubernetes"
        )
    return dynamo


def _component(component: Component, source: Source) -> tuple[ServiceArgs, Settings | None]:
    """Return how one component is run and what it is told; None if it is not."""
    name = component.name
    section = _with_common(source, name)
    args = _service_args(section, component)
    if not args.workers:
        return args, None
    section.tree[name].pop(ARGS, None)
    section.tree[name].pop(SUBSCRIPTION, None)
    settings: Settings = convert(section, component.config_type, (name,))
    if args.workers > 1 and component.address(settings):
        raise ConfigError(
            f"{source.at((name, ARGS, 'workers'))}must be 1: {name} listens on a fixed port"
        )
    return args, settings


def _with_common(source: Source, name: str) -> Source:
    """Return a component's section with the keys of `Common` that it subscribes to laid under."""
    own: dict[str, Any] = source.tree.get(name) or {}
    common: dict[str, Any] = source.tree.get(COMMON) or {}
    keys = own.get(SUBSCRIPTION, [])
    if not (isinstance(keys, list) and all(isinstance(key, str) for key in keys)):
        raise ConfigError(f"{source.at((name, SUBSCRIPTION))}expected a list of keys of {COMMON}")
    keys = [snake(key) for key in keys]
    for key in keys:
        if key not in common:
            raise ConfigError(
                f'{source.at((name, SUBSCRIPTION))}{COMMON} has no "{key}"{suggest(key, common)}'
            )
    shared = {key: common[key] for key in keys}
    origins = {
        (name, *path[1:]): where
        for path, where in source.origins.items()
        if path[0] == COMMON and path[1:2] and path[1] in shared
    }
    return Source({name: merge(shared, own)}, {**origins, **source.origins})


def _service_args(section: Source, component: Component) -> ServiceArgs:
    name = component.name
    tree = section.tree[name].get(ARGS) or {}
    if isinstance(tree, dict):  # Dynamo's own files write numbers as text here, and text as numbers
        tree = {"workers": component.workers, **tree}
        if isinstance(tree.get("resources"), dict):
            tree["resources"] = {k: _number_or_text(k, v) for k, v in tree["resources"].items()}
        if isinstance(tree.get("envs"), dict):
            tree["envs"] = {str(k): _env_text(v) for k, v in tree["envs"].items()}
    return convert(Source({name: {ARGS: tree}}, section.origins), ServiceArgs, (name, ARGS))


def _number_or_text(key: str, value: Any) -> Any:
    if key == "gpu":
        return int(value) if isinstance(value, str) and value.isdecimal() else value
    return str(value)


def _env_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def process_plans(
    deployment: Deployment,
    folders: Folders,
    *,
    environment: Mapping[str, str],
    gpus: Sequence[str] | None,
    system_ports: Iterator[int],
    import_root: str,
) -> list[ProcessPlan]:
    """Return one plan per process, in the order of the start.

    Args:
        environment: the launcher's own; decides only where a default gives way.
        gpus: indices that may be handed out; None: allocation is off.
        system_ports: free ports for the workers' health servers.
        import_root: folder that the children import from first.

    Raises:
        ConfigError: more GPUs wanted than there are.
    """
    shared = _shared_env(deployment.dynamo, folders, environment, import_root)
    free = list(gpus or ())
    plans = []
    for component in deployment.graph.components:
        args = deployment.args[component.name]
        settings = deployment.settings[component.name]
        arguments = component.arguments(settings, f"{folders.config}/{component.name}.json")
        for number in range(1, args.workers + 1):
            port = _chosen_port(component.name, args, number)
            if not (port or component.is_frontend):
                port = next(system_ports)
            env = dict(shared)
            if args.resources.gpu and gpus is not None:
                mine, free = free[: args.resources.gpu], free[args.resources.gpu :]
                if len(mine) < args.resources.gpu:
                    raise ConfigError(
                        f"{component.name}.{ARGS}.resources.gpu: process {number} wants "
                        f"{args.resources.gpu} GPUs, {len(mine)} of {len(gpus)} are left"
                    )
                env["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
            plans.append(
                ProcessPlan(
                    name=f"{component.name}-{number}" if args.workers > 1 else component.name,
                    component=component,
                    command=(
                        component.python(settings) or sys.executable,
                        "-m",
                        component.module,
                        *arguments,
                    ),
                    env={
                        **env,
                        **component.environment(settings),
                        **args.envs,
                        SYSTEM_PORT: str(port or -1),
                    },
                    system_port=port,
                )
            )
    return plans


def _chosen_port(name: str, args: ServiceArgs, number: int) -> int:
    """Return the user's port for health and metrics, counted up from worker to worker; 0: none."""
    text = args.envs.get(SYSTEM_PORT, "")
    if not text:
        return 0
    port = int(text) + number - 1 if text.isdecimal() else 0
    if not 0 < port <= SYSTEM_PORT_MAX:
        raise ConfigError(
            f"{name}.{ARGS}.envs.{SYSTEM_PORT} ({text}): process {number} needs a port "
            f"from 1 to {SYSTEM_PORT_MAX}"
        )
    return port


def _shared_env(
    dynamo: DynamoConfig, folders: Folders, environment: Mapping[str, str], import_root: str
) -> dict[str, str]:
    is_local = dynamo.discovery_backend == "file"
    defaults = {**ENV_DEFAULTS, **(ENV_ONE_HOST if is_local else {})}
    paths = [import_root, *filter(None, [environment.get("PYTHONPATH")])]
    env = {
        **{key: value for key, value in defaults.items() if key not in environment},
        "DYN_NAMESPACE": dynamo.namespace,
        "DYN_DISCOVERY_BACKEND": dynamo.discovery_backend,
        "DYN_REQUEST_PLANE": dynamo.request_plane,
        "DYN_EVENT_PLANE": dynamo.event_plane,
        "DYN_SYSTEM_HOST": "127.0.0.1",
        "DYN_SDK_DISABLE_ANSI_LOGGING": "1",  # the launcher colours
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": ":".join(paths),
        "TMPDIR": folders.temporary,
    }
    if is_local:
        env["DYN_FILE_KV"] = dynamo.store_folder or folders.store
    if dynamo.etcd_endpoints:
        env["ETCD_ENDPOINTS"] = dynamo.etcd_endpoints
    if dynamo.nats_server:
        env["NATS_SERVER"] = dynamo.nats_server
    return env


def command_line(plan: ProcessPlan) -> str:
    """Return a process's command as it could be pasted into a shell."""
    return shlex.join(plan.command)
