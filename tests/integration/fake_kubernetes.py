"""The little of a Kubernetes API server that Dynamo's discovery asks for, on loopback.

Two collections, each listed and then watched: DynamoWorkerMetadata, which workers apply, and the
EndpointSlices that a real cluster would keep, here one ready pod per `ready_pods` entry.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

WORKERS, SLICES = "dynamoworkermetadatas", "endpointslices"
KINDS = {
    WORKERS: ("nvidia.com/v1alpha1", "DynamoWorkerMetadata"),
    SLICES: ("discovery.k8s.io/v1", "EndpointSlice"),
}


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client that was killed in the middle of a watch is no news."""


class FakeKubernetes:
    """Objects by collection and name, and everybody who watches."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.objects: dict[str, dict[str, dict[str, Any]]] = {WORKERS: {}, SLICES: {}}
        self.applied: list[str] = []  # names of objects, in the order of the requests
        self.changed = threading.Condition()
        self.version = 1
        self.is_closing = False
        self._log: list[tuple[int, str, dict[str, Any]]] = []  # version, collection, event
        self._server = _Server(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def kubeconfig(self, file: Path) -> Path:
        """Write a client configuration that leads here."""
        url = f"http://127.0.0.1:{self._server.server_address[1]}"
        tree = {
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "k", "cluster": {"server": url}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [
                {"name": "c", "context": {"cluster": "k", "user": "u", "namespace": self.namespace}}
            ],
        }  # fmt: skip
        file.write_text(json.dumps(tree))
        return file

    def put(self, collection: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Store an object and tell the watchers."""
        with self.changed:
            self.version += 1
            version, kind = KINDS[collection]
            known = self.objects[collection].get(name)
            metadata = {
                **body.get("metadata", {}), "name": name, "namespace": self.namespace,
                "uid": f"uid-{collection}-{name}", "resourceVersion": str(self.version),
                "generation": self.version,
            }  # fmt: skip
            stored = {**body, "apiVersion": version, "kind": kind, "metadata": metadata}
            self.objects[collection][name] = stored
            event = {"type": "MODIFIED" if known else "ADDED", "object": stored}
            self._log.append((self.version, collection, event))
            self.changed.notify_all()
            return stored

    def set_pod(self, name: str, uid: str, *, is_ready: bool) -> None:
        """Make a pod ready or not, as the endpoint controller would."""
        endpoint = {
            "addresses": ["127.0.0.1"],
            "conditions": {"ready": is_ready, "serving": is_ready},
            "targetRef": {"kind": "Pod", "name": name, "uid": uid, "namespace": self.namespace},
        }
        labels = {"nvidia.com/dynamo-discovery-enabled": "true"}
        body = {"addressType": "IPv4", "endpoints": [endpoint], "ports": [{"port": 9090}]}
        self.put(SLICES, f"slice-{name}", {"metadata": {"labels": labels}, **body})

    def endpoints(self, pod: str) -> list[str]:
        """Return the endpoint keys that a pod has announced."""
        found = self.objects[WORKERS].get(pod, {}).get("spec", {}).get("data", {})
        return sorted(found.get("endpoints", {}))

    def close(self) -> None:
        """End all watches and the server."""
        with self.changed:
            self.is_closing = True
            self.changed.notify_all()
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_args: Any) -> None:
                """Say nothing."""

            def _where(self) -> tuple[str, str]:
                parts = self.path.partition("?")[0].strip("/").split("/")
                rest = parts[parts.index("namespaces") + 2 :] if "namespaces" in parts else []
                return (rest[0] if rest else "", rest[1] if len(rest) > 1 else "")

            def _reply(self, tree: dict[str, Any], status: int = 200) -> None:
                body = json.dumps(tree).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                collection, name = self._where()
                if collection not in KINDS or name:
                    failure = {"kind": "Status", "status": "Failure", "code": 404}
                    self._reply({**failure, "apiVersion": "v1", "message": "unknown"}, 404)
                elif "watch=" in self.path:
                    self._watch(collection)
                else:
                    version, kind = KINDS[collection]
                    with api.changed:
                        items = list(api.objects[collection].values())
                        metadata = {"resourceVersion": str(api.version)}
                    kinds = {"apiVersion": version, "kind": f"{kind}List"}
                    self._reply({**kinds, "metadata": metadata, "items": items})

            def do_PATCH(self) -> None:
                collection, name = self._where()
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                api.applied.append(name)
                self._reply(api.put(collection, name, body))

            def _watch(self, collection: str) -> None:
                since = int(self.path.partition("resourceVersion=")[2].partition("&")[0] or 0)
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                with contextlib.suppress(OSError):
                    while not api.is_closing:
                        with api.changed:
                            news = [entry for entry in api._log if entry[0] > since]
                            if not news:
                                api.changed.wait(1.0)
                                continue
                        since = news[-1][0]
                        for _version, which, event in news:
                            if which == collection:
                                line = json.dumps(event).encode() + b"\n"
                                self.wfile.write(b"%x\r\n%b\r\n" % (len(line), line))
                                self.wfile.flush()

        return Handler


@contextlib.contextmanager
def fake_kubernetes(namespace: str) -> Iterator[FakeKubernetes]:
    """Yield a server and close it at the end."""
    api = FakeKubernetes(namespace)
    try:
        yield api
    finally:
        api.close()
