"""Hosts as network namespaces on one bridge: links that tests can cut and heal."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator

import pytest


def run(*command: str) -> str:
    """Run a short command; its output is the message when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr or done.stdout}"
    return done.stdout


class Network:
    """A bridge of this machine (address .254) with one namespace per host (.1, .2, …)."""

    def __init__(self, hosts: int) -> None:
        self._tag = f"wp{secrets.token_hex(2)}"
        self._bridge = f"{self._tag}br"
        self._net = f"10.{100 + secrets.randbelow(100)}.{secrets.randbelow(256)}"
        self.hub = f"{self._net}.254"
        self.hosts = hosts

    def build(self) -> None:
        bridge = self._bridge
        run("ip", "link", "add", bridge, "type", "bridge")
        run("ip", "address", "add", f"{self.hub}/24", "dev", bridge)
        run("ip", "link", "set", bridge, "up")
        for host in range(1, self.hosts + 1):
            space, link = self._space(host), self._link(host)
            run("ip", "netns", "add", space)
            run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
            run("ip", "link", "set", link, "master", bridge, "up")
            inside = ("ip", "-n", space)
            run(*inside, "link", "set", "lo", "up")
            run(*inside, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            run(*inside, "link", "set", "eth0", "up")
            # The test's own runtime may be reached under another address of this machine.
            run(*inside, "route", "add", "default", "via", self.hub)

    def remove(self) -> None:
        """Remove what was made, also after half a `build`."""
        for host in range(1, self.hosts + 1):
            for command in (
                ("ip", "link", "del", self._link(host)),
                ("ip", "netns", "del", self._space(host)),
            ):
                subprocess.run(command, capture_output=True, timeout=20, check=False)
        subprocess.run(
            ("ip", "link", "del", self._bridge), capture_output=True, timeout=20, check=False
        )

    def address(self, host: int) -> str:
        return f"{self._net}.{host}"

    def inside(self, host: int) -> tuple[str, ...]:
        """Return the words before a command that runs on a host; its pid stays the same."""
        return ("ip", "netns", "exec", self._space(host))

    def cut(self, host: int) -> None:
        """Lose every packet from and to a host; its link stays up, so neither side is told."""
        run("ip", "link", "set", self._link(host), "nomaster")

    def heal(self, host: int) -> None:
        run("ip", "link", "set", self._link(host), "master", self._bridge)

    def _space(self, host: int) -> str:
        return f"{self._tag}h{host}"

    def _link(self, host: int) -> str:
        return f"{self._tag}v{host}"


@contextlib.contextmanager
def network(hosts: int) -> Iterator[Network]:
    """Yield a network of so many hosts; skip the test where that is not possible."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if not shutil.which("ip"):
        pytest.skip("network namespaces need ip (iproute2)")
    net = Network(hosts)
    try:
        try:
            net.build()
        except AssertionError as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield net
    finally:
        net.remove()
