"""`wavepp plan MODEL --gpus N --gpu-memory SIZE`: the sizes of a worker, from config.json alone."""

from __future__ import annotations

import argparse
import os
import re
from typing import Any

import msgspec

from wavepp_worker.base.errors import ConfigError
from wavepp_worker.config.load import Source, convert, read_override
from wavepp_worker.config.overrides import merge
from wavepp_worker.config.schema import Config
from wavepp_worker.model.sizing import Sizing, size_worker
from wavepp_worker.model.spec import read_facts, read_spec

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
         "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}  # fmt: skip
SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGT]i?|)B?")
GIB = 2**30

HELP = """\
Print what a prefill worker would have on given GPUs: weights and cache of every stage, wave sizes,
headroom, host tier.  Reads MODEL's config.json only, touches no GPU, and uses the arithmetic of a
real start.

examples:
  %(prog)s ~/models/Qwen3-32B --gpus 4 --gpu-memory 80GiB
  %(prog)s ~/models/Qwen3-32B --gpus 8 --gpu-memory 141GB --host-memory 1TiB
  %(prog)s ~/models/Qwen3-32B --gpus 4 --gpu-memory 80GiB --set planner.wave_tokens_max=8192
"""


def add_plan(commands: Any) -> None:
    """Add `plan` to the commands of `wavepp`."""
    parser = commands.add_parser(
        "plan",
        help="what fits on given GPUs: cache, waves, headroom",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="Hugging Face folder; config.json is enough")
    add("--gpus", type=int, required=True, help="P: one stage each")
    add("--gpu-memory", metavar="SIZE", required=True, help="of one GPU, such as 80GiB or 141GB")
    add("--reserve", metavar="SIZE", default="2GiB",
        help="of each GPU for CUDA, NCCL, workspaces: a guess; default: %(default)s")  # fmt: skip
    add("--host-memory", metavar="SIZE", help="of the host: says how large the host tier may be")
    add("--set", metavar="PATH=VALUE", action="append", default=[],
        help="a key of the worker's configuration, such as cache.block_tokens=32")  # fmt: skip
    add("--json", action="store_true", help="numbers for programs: tokens and bytes")
    parser.set_defaults(run=_plan)


def _plan(args: argparse.Namespace) -> int:
    own: dict[str, Any] = {"model": {"path": args.model}, "cluster": {"stages": args.gpus}}
    sets = read_override(args.set)
    config = convert(Source(merge(own, sets.tree), sets.origins), Config)
    model = config.model
    sizing = size_worker(
        config,
        read_spec(model.path, model.dtype),
        read_facts(model.path, model.dtype, "dummy"),
        gpu_bytes=parse_size("--gpu-memory", args.gpu_memory),
        reserve_bytes=parse_size("--reserve", args.reserve),
        host_memory_bytes=parse_size("--host-memory", args.host_memory)
        if args.host_memory
        else None,
    )
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(sizing)).decode())
    else:
        print(as_text(config, sizing))
    return os.EX_OK


def parse_size(option: str, text: str) -> int:
    """Return bytes: "80GiB" and "80Gi" are 80 * 2^30, "80GB" and "80G" 80 * 10^9.

    Raises:
        ConfigError: not a size.
    """
    match = SIZE.fullmatch(text)
    if not match:
        raise ConfigError(f"{option} {text}: expected a size such as 80GiB, 141GB or 512MiB")
    return int(float(match[1]) * UNITS[match[2]])


def as_text(config: Config, sizing: Sizing) -> str:
    """Return the sizes as a table and one line per number, each with how it comes about."""
    lines = ["stage  layers     weights      free   cache/token   cache tokens"]
    for index, stage in enumerate(sizing.stages):
        layers = f"{stage.first}-{stage.stop - 1}"
        lines.append(
            f"{index:5}  {layers:>7}  {stage.weights_bytes / GIB:6.2f} GiB  "
            f"{stage.free_bytes / GIB:5.1f} GiB  {stage.token_bytes:7} B  {stage.cache_tokens:13,}"
        )
    stages, kappa = len(sizing.stages), config.admission.headroom_factor
    rows = [
        ("cache", sizing.cache_tokens, "tokens, the smallest stage's: the worker's as a whole"),
        ("M", sizing.wave_tokens_max, f"tokens in a full wave, {sizing.wave_bytes / 2**20:.1f} MiB "
         "from stage to stage (planner.wave_tokens_max)"),
        ("b_min", sizing.wave_tokens_min, "tokens, the smallest wave that work is cut into"),
        ("ring", sizing.ring_waves, "waves under way at most: 2P"),
        ("headroom", sizing.headroom_tokens,
         f"tokens free at selection: {kappa:g} x 2 x {stages} x M (admission.headroom_factor)"),
        ("floor", sizing.floor_tokens, "tokens that promises leave alone (cache.floor_fraction)"),
        ("prompt", sizing.prompt_tokens_max, "tokens at most: the model's limit or the cache"),
        ("beside", sizing.prompt_tokens_beside_headroom,
         "tokens: longer prompts are admitted alone"),
    ]  # fmt: skip
    if sizing.host_tokens:
        size = f"tokens per stage, {sizing.host_bytes / GIB:.1f} GiB for all (cache.host_tokens)"
        rows.append(("host tier", sizing.host_tokens, size))
    if sizing.host_tokens_max is not None:
        rows.append(("host max", sizing.host_tokens_max, "tokens per stage fit --host-memory"))
    for index, stage in enumerate(sizing.stages):
        if stage.state_slots:
            what = f"states of {stage.state_bytes / 2**20:.1f} MiB: requests and snapshots"
            rows.append((f"stage {index}", stage.state_slots, what))
    lines += ["", *(f"{name:9} {value:13,}  {text}" for name, value, text in rows)]
    if sizing.headroom_tokens >= sizing.cache_tokens:
        lines += ["", "note: the headroom is larger than the cache, so every prompt is admitted "
                  "alone: use a smaller M, or more GPUs"]  # fmt: skip
    if sizing.host_tokens_max is not None and sizing.host_tokens > sizing.host_tokens_max:
        lines += ["", "note: cache.host_tokens is more than --host-memory holds"]
    return "\n".join(lines)
