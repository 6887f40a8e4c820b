"""The WavePP prefill worker: `python -m components.prefill_worker --config FILE`."""

from __future__ import annotations

import os
import signal
import sys

from dynamo.common.backend.run import run

from wavepp_worker.base.errors import ConfigError
from wavepp_worker.serving.engine import WavePPEngine, exit_process


def main() -> int:
    """Serve until SIGTERM or SIGINT; return the process's exit status."""
    # Dynamo ends in order on SIGTERM alone; Ctrl-C means the same.
    signal.signal(signal.SIGINT, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    try:
        run(WavePPEngine)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    exit_process(main())
