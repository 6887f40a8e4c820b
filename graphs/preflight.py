"""What is checked on this machine before anything starts; every refusal is one clear line."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from graphs.deployment import Deployment
from wavepp_worker.base.errors import ConfigError

CONNECT_TIMEOUT_S = 2.0
HEALTH_PORTS = (20_000, 12_000)  # first, count


def preflight(deployment: Deployment, environment: Mapping[str, str]) -> None:
    """Check packages, services, ports and model folders.

    Raises:
        ConfigError: one line per thing that is missing or taken.
    """
    complaints = [*_packages(deployment), *_services(deployment, environment)]
    for component in deployment.graph.components:
        settings = deployment.settings[component.name]
        address = component.address(settings)
        if address and (reason := _cannot_listen(*address)):
            complaints.append(
                f"{component.name}.port: cannot listen on {address[0]}:{address[1]}: {reason}; "
                "choose another with --port"
            )
        try:
            component.check(settings)
        except ConfigError as error:
            complaints.append(f"{component.name}: {error}")
    if complaints:
        raise ConfigError("\n".join(dict.fromkeys(complaints)))


def visible_gpus(environment: Mapping[str, str]) -> list[str] | None:
    """Return the GPUs that may be handed out; None when allocation is switched off."""
    if environment.get("DYN_DISABLE_AUTO_GPU_ALLOCATION", "").lower() in ("1", "true", "yes"):
        return None
    if (visible := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    cards = (name for name in _listing("/dev") if re.fullmatch(r"nvidia\d+", name))
    return [str(index) for index, _ in enumerate(sorted(cards))]


def free_ports() -> Iterator[int]:
    """Yield loopback ports for health servers that nobody listens on, each once.

    They lie below the range that the kernel hands out by itself, so a port stays free until its
    process binds it, and below 32,768, because Dynamo reads DYN_SYSTEM_PORT as a 16-bit signed
    number.  Graphs that start together search from different places.
    """
    first, count = HEALTH_PORTS
    start = os.getpid() * 64 % count
    for offset in range(count):
        port = first + (start + offset) % count
        if not _cannot_listen("127.0.0.1", port):
            yield port


def _packages(deployment: Deployment) -> list[str]:
    complaints = []
    for component in deployment.graph.components:
        try:
            found = importlib.util.find_spec(component.module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            complaints.append(
                f"{component.name}: Python package {component.module} is not installed; "
                "`make serve` installs all that is needed"
            )
    return complaints


def _services(deployment: Deployment, environment: Mapping[str, str]) -> list[str]:
    """Return complaints about etcd and NATS, when the planes use them."""
    dynamo = deployment.dynamo
    wanted = []
    if dynamo.discovery_backend == "etcd":
        default = environment.get("ETCD_ENDPOINTS", "http://127.0.0.1:2379")
        wanted.append(("etcd", "etcd_endpoints", dynamo.etcd_endpoints or default, 2379))
    if "nats" in (dynamo.request_plane, dynamo.event_plane):
        default = environment.get("NATS_SERVER", "nats://127.0.0.1:4222")
        wanted.append(("NATS", "nats_server", dynamo.nats_server or default, 4222))
    complaints = []
    for what, key, addresses, port in wanted:
        if not any(_answers(address.strip(), port) for address in addresses.split(",")):
            complaints.append(f"Dynamo.{key}: no {what} answers at {addresses}")
    return complaints


def _answers(address: str, default_port: int) -> bool:
    parts = urlsplit(address if "://" in address else f"//{address}")
    try:
        where = (parts.hostname or "127.0.0.1", parts.port or default_port)
        socket.create_connection(where, CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError):
        return False
    return True


def _cannot_listen(host: str, port: int) -> str:
    """Return why nobody can listen there, or ""."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            probe.listen(1)
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return ""


def _listing(folder: str) -> list[str]:
    return os.listdir(folder) if Path(folder).is_dir() else []
