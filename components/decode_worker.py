"""The reference decode worker: `python -m components.decode_worker --config FILE`."""

from __future__ import annotations

import sys

from dynamo.common.backend.run import run

from wavepp_worker.base.errors import ConfigError
from wavepp_worker.decode.engine import DecodeEngine


def main() -> int:
    """Serve until SIGTERM; return the process's exit status."""
    try:
        run(DecodeEngine)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
