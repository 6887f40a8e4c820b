"""`python -m wavepp_worker` is the `wavepp` command."""

from wavepp_worker.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
