"""`wavepp rank`: runs some ranks of a prefill worker whose serving process is on another host."""

from __future__ import annotations

import argparse
import asyncio
import logging
import re
import sys
from typing import Any

from wavepp_worker.base.errors import ConfigError, WavePPError
from wavepp_worker.config.load import load_config
from wavepp_worker.config.schema import first_host_ranks

EXIT_FAILED = 1
PORT_MAX = 65535

RANK_HELP = """\
Run some ranks of a prefill worker on this host.  One command per host; the first host runs the
serving process and the first ranks, this command runs others.

a worker of three stages on two hosts (both need the model's folder and one discovery backend):

  first host   python -m components.prefill_worker --config worker.yaml --set cluster.host=10.0.0.1
  other host   %(prog)s -f worker.yaml --set cluster.host=10.0.0.2 --ranks 2 --leader 10.0.0.1:7100

with worker.yaml the same on both:

  cluster: {stages: 3, first_host_stages: 2, group: NAME, join_port: 7100}
  ...

Start the hosts in any order.  To stop, stop the first host: the others end with it.
"""

RANK_EPILOG = """\
The hosts' files may differ in cluster.host, devices, threads, start_timeout_s, model.path, obs and
debug; any other difference is refused, and so is other weights, another version, a rank that runs
already, or an --epoch that is over.  A host that is lost ends the worker on all hosts.  Ranks meet
through Dynamo's discovery, so DYN_DISCOVERY_BACKEND and its address must be set as on the first
host.

Exit status: 0 the worker ended in order or this host was asked to stop (which fails the worker),
1 the worker failed, 2 refused.
"""


def add_rank(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "rank",
        help="run some ranks of a worker whose serving process is on another host",
        description=RANK_HELP,
        epilog=RANK_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-f", "--config", metavar="FILE", required=True, help="YAML or JSON file of the worker")
    add("--set", metavar="PATH=VALUE", action="append", default=[],
        help="change one key; repeatable")  # fmt: skip
    add("--ranks", metavar="N[-M]", required=True, help="ranks to run here, e.g. 2 or 2-3")
    add("--leader", metavar="HOST:PORT", required=True,
        help="cluster.host and cluster.join_port of the first host")  # fmt: skip
    add("--group-id", metavar="NAME", help="instead of cluster.group; both hosts must agree")
    add("--epoch", metavar="N", type=int, default=0,
        help="join this life of the worker only, as its log tells it; default: any")  # fmt: skip
    parser.set_defaults(run=_rank)


def _rank(args: argparse.Namespace) -> int:
    sets = list(args.set)
    if args.group_id is not None:
        sets.append(f"cluster.group={args.group_id}")
    config = load_config(args.config, sets)
    ranks = read_ranks(args.ranks, first_host_ranks(config.cluster), config.cluster.stages)
    leader = read_address(args.leader)
    logging.basicConfig(
        level=config.obs.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )

    # The other commands need no sockets.
    from wavepp_worker.runtime.host_join import run_host
    from wavepp_worker.serving.ranks import read_plan

    facts, plan = read_plan(config)
    try:
        asyncio.run(run_host(config, plan, facts, ranks, leader=leader, epoch=args.epoch))
    except ConfigError:
        raise
    except WavePPError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    return 0


def read_ranks(text: str, first: int, stages: int) -> tuple[int, ...]:
    """Return the ranks that `text` ("2" or "2-3") names.

    Raises:
        ConfigError: malformed, or not ranks `first` to `stages` - 1.
    """
    match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", text)
    if match is None:
        raise ConfigError(f"--ranks {text}: a number or a range is needed, as in 2 or 2-3")
    begin, end = int(match[1]), int(match[2] or match[1])
    if not first <= begin <= end < stages:
        raise ConfigError(
            f"--ranks {text}: the first host runs ranks 0 to {first - 1} "
            f"(cluster.first_host_stages) of {stages} (cluster.stages)"
        )
    return tuple(range(begin, end + 1))


def read_address(text: str) -> tuple[str, int]:
    """Return host and port of "HOST:PORT" or "[IPV6]:PORT"; ConfigError if it is neither."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= PORT_MAX:
        raise ConfigError(f"--leader {text}: HOST:PORT is needed, as in 10.0.0.1:7100")
    return host.strip("[]"), int(port)
