"""A graph: which components a deployment has and what each needs.  Data only; nothing runs here.

A graph module (see `graphs.disagg`) defines one `Component` per kind of process and links them:

    Frontend = Component(name="Frontend", ..., needs=(PrefillWorker, DecodeWorker))

The component that no other needs is the graph's root.  `graphs.resolve` finds it,
`graphs.deployment` joins it with a configuration file, `graphs.launch` runs the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from wavepp_worker.base.errors import ConfigError
from wavepp_worker.config.schema import NaturalInt, Section

Settings = Any  # an instance of the component's own `config_type`


class Resources(Section, frozen=True):
    """What one process of a component gets."""

    gpu: NaturalInt = 0
    """GPUs of its own, passed as CUDA_VISIBLE_DEVICES; 0: no allocation."""
    cpu: str = ""
    """For Kubernetes; a local launch does not limit processors."""
    memory: str = ""
    """For Kubernetes; a local launch does not limit memory."""


class ServiceArgs(Section, frozen=True):
    """How a component is run, as opposed to what it is told."""

    workers: Annotated[NaturalInt, Meta(le=64)] = 1
    """Processes of this component.  0: the graph runs without it."""
    resources: Resources = field(default_factory=Resources)
    envs: dict[str, str] = field(default_factory=dict)
    """Environment variables of its processes, over everything the launcher sets."""


class Pod(Struct, frozen=True, kw_only=True):
    """What a cluster must know of one process of a component; all of it follows from its settings.

    Attributes:
        name: of the component in the deployment; a worker's own name in Dynamo's registry.
        kind: Dynamo's component type.
        gpus: GPUs that the process opens.
        cpus: processors to reserve: one for each process that must not wait for another.
        arguments: more command line arguments; `$(POD_IP)` is the pod's address.
        settings: the component's settings as they have to be in a pod.
        start_s: longest start; the process gives up by itself after it.
        silence_s: longest time that a healthy process may be silent; it ends itself after that.
        drain_s: least time that a stop must leave to finish what others still read.
    """

    name: str
    kind: Literal["frontend", "prefill", "decode"]
    settings: Settings
    gpus: int = 0
    cpus: int = 1
    arguments: tuple[str, ...] = ()
    start_s: float = 600.0
    silence_s: float = 60.0
    drain_s: float = 0.0


def no_address(_settings: Settings) -> tuple[str, int] | None:
    """Return None: the component listens on no fixed port."""
    return None


def no_complaint(_settings: Settings) -> None:
    """Accept everything."""


class Component(Struct, frozen=True, kw_only=True):
    """One kind of process.  Its name is also its section in the configuration file.

    Attributes:
        does: a few words for the table of processes.
        config_type: what its section is converted to.
        module: run as `python -m module *arguments`.
        arguments: (settings, path of a JSON file with the settings) → command line arguments.
        address: settings → fixed (host, port) it listens on; must be free before the start.
        model_name: settings → name that `/v1/models` lists once this component is up, or "".
        check: raises `ConfigError` when the settings cannot work on this machine (model folder).
        pod: settings → what a cluster must know; None: the component cannot run in a cluster.
        python: settings → the interpreter it runs on, of another environment; "": the launcher's.
        environment: settings → variables that it reads; `ServiceArgs.envs` goes over them.
        workers: processes, unless its `ServiceArgs` says otherwise.
        is_frontend: serves the OpenAI API; ready when `/v1/models` lists every model name.
            Other components are ready when Dynamo's `/health` says so.
        needs: components that must be up for this one to be of use.
    """

    name: str
    does: str
    config_type: type[Struct]
    module: str
    arguments: Callable[[Settings, str], tuple[str, ...]]
    address: Callable[[Settings], tuple[str, int] | None] = no_address
    model_name: Callable[[Settings], str] = lambda _settings: ""
    check: Callable[[Settings], None] = no_complaint
    pod: Callable[[Settings], Pod] | None = None
    python: Callable[[Settings], str] = lambda _settings: ""
    environment: Callable[[Settings], dict[str, str]] = lambda _settings: {}
    workers: int = 1
    is_frontend: bool = False
    needs: tuple[Component, ...] = ()


class Graph(Struct, frozen=True, kw_only=True):
    """Everything that a root component reaches, needed ones first."""

    spec: str  # how the user named it
    components: tuple[Component, ...]
    section_names: tuple[str, ...]  # every component of the module may have one in the file
    relate: Callable[[Mapping[str, Settings], Mapping[str, ServiceArgs]], None]
    """(component name → settings, → service args): raises `ConfigError` for what cannot fit."""


def reachable(root: Component) -> tuple[Component, ...]:
    """Return `root` and all it needs, needed components first.

    Raises:
        ConfigError: two components share a name.
    """
    order: list[Component] = []

    def visit(component: Component) -> None:
        if any(component is known for known in order):
            return
        for needed in component.needs:
            visit(needed)
        order.append(component)

    visit(root)
    names = [component.name for component in order]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f'graph: two components are called "{name}"')
    return tuple(order)
