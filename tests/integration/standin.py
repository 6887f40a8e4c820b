"""A stand-in process for launcher tests: answers readiness questions, ends as its settings say.

    python -m tests.integration.standin FILE      a worker: /health on DYN_SYSTEM_PORT
    python -m tests.integration.standin HOST:PORT a frontend: /v1/models

It prints facts as `key=value` words, which the launcher prefixes and the tests read.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

DONE = threading.Event()


class Handler(BaseHTTPRequestHandler):
    """Says that everything is fine."""

    def do_GET(self) -> None:
        body = json.dumps({"status": "ready", "data": [{"id": "stand-in"}]}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args: Any) -> None:
        pass


def main() -> int:
    what = sys.argv[1]
    settings = json.loads(Path(what).read_text()) if os.path.exists(what) else {}
    print(f"pid={os.getpid()} tmp={os.environ['TMPDIR']} store={os.environ['DYN_FILE_KV']}")
    print(f"cuda={os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')} key={os.environ.get('KEY', '')}")
    Path(os.environ["TMPDIR"], f"left-{os.getpid()}").touch()
    if settings.get("mode") == "refuse":
        print("this model is too large for me")
        return 3
    if settings.get("mode") == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: DONE.set())
    if settings.get("mode") == "parent":
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        print(f"grandchild={child.pid}")
    host, port = (
        what.rsplit(":", 1) if ":" in what else ("127.0.0.1", os.environ["DYN_SYSTEM_PORT"])
    )
    server = HTTPServer((host, int(port)), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    DONE.wait()
    print(f"ended={'frontend' if ':' in what else 'worker'}")
    return 0


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    raise SystemExit(main())
