"""The same stages on a CUDA device: equal in fp32, rounding in 16 bits, bounded memory."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from tests.numerics.pipeline import TOLERANCE, Oracle, Pipeline, assert_rounding_only, make_chunk
from tests.numerics.tiny import VOCAB, make_tiny_model, tiny_config
from wavepp_worker.executor.ports import ChunkState, WaveChunk
from wavepp_worker.model.delta_kernel import run_delta_rule
from wavepp_worker.model.delta_rule import delta_rule
from wavepp_worker.model.load import load_stage
from wavepp_worker.model.metadata import build_batch
from wavepp_worker.model.sampling import sample
from wavepp_worker.model.spec import read_spec
from wavepp_worker.model.split_attention import fits, split_attention
from wavepp_worker.wire.mailbox import Copy, Sampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

RNG = random.Random(1)
PROMPT = [RNG.randrange(VOCAB) for _ in range(193)]
TABLE = tuple(RNG.sample(range(64), 13))
CHUNKS = [50, 80, 62, 1]
ENDS = [49, 129, 191, 192]
STATES = 1  # the recurrent window, as in `make_chunk`'s chunks


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_cuda_stages_equal_transformers(tmp_path: Path, family: str, dtype: str) -> None:
    folder = make_tiny_model(tmp_path, family, seed=2)
    want = Oracle(folder).logits(PROMPT)
    reference = Oracle(folder, getattr(torch, dtype)).logits(PROMPT)
    pipeline = Pipeline(folder, (0, 2, 5), device="cuda", dtype=dtype)
    for chunks, ends in (([193], [192]), (CHUNKS, ENDS)):
        got = pipeline.prefill(PROMPT, TABLE, chunks).cpu()
        if dtype == "float32":
            torch.testing.assert_close(got, want[ends], **TOLERANCE)
        else:
            assert_rounding_only(got, want[ends], reference[ends])


@pytest.mark.parametrize("family", ["qwen3_moe", "minimax_m2", "deepseek_v3"])
def test_cuda_stages_with_experts_equal_transformers(tmp_path: Path, family: str) -> None:
    """In fp32 only: in 16 bits rounding may choose another expert."""
    folder = make_tiny_model(tmp_path, family, seed=3)
    want = Oracle(folder).logits(PROMPT)
    pipeline = Pipeline(folder, (0, 2, 5), device="cuda", dtype="float32")
    for chunks, ends in (([193], [192]), (CHUNKS, ENDS)):
        got = pipeline.prefill(PROMPT, TABLE, chunks).cpu()
        torch.testing.assert_close(got, want[ends], **TOLERANCE)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "kimi_linear"])
def test_cuda_stages_with_states_equal_transformers(tmp_path: Path, family: str) -> None:
    """In chunks, and resumed from a snapshot that was in host memory meanwhile."""
    folder = make_tiny_model(tmp_path, family, seed=3)
    oracle = Oracle(folder)
    want = oracle.logits(PROMPT)
    pipeline = Pipeline(folder, (0, 2, 5), device="cuda", dtype="float32")
    pipeline.copy_states(Copy("zero_state", STATES, -1, 3))
    rows, start = [], 0
    for length in [50, 78, 64, 1]:
        snapshot = 9 if start + length == 128 else -1
        state = ChunkState(STATES, 3, snapshot)
        rows.append(pipeline.run([make_chunk(PROMPT, start, length, TABLE, states=(state,))]))
        start += length
    torch.testing.assert_close(torch.cat(rows).cpu(), want[[49, 127, 191, 192]], **TOLERANCE)
    pipeline.copy_states(
        Copy("offload", STATES, 9, 5),
        Copy("zero_state", STATES, -1, 9),
        Copy("onboard_state", STATES, 5, 4),
    )
    chunk = make_chunk(PROMPT, 128, 65, TABLE, states=(ChunkState(STATES, 4),))
    torch.testing.assert_close(pipeline.run([chunk]).cpu(), want[[192]], **TOLERANCE)


@pytest.mark.parametrize("decays", [1, 128])
@pytest.mark.parametrize("tokens", [1, 63, 200, 1024])
def test_the_delta_kernels_compute_what_plain_torch_does(tokens: int, decays: int) -> None:
    """fla-core in bf16 against fp64 on the same rounded inputs, states in fp32."""
    pytest.importorskip("fla")
    heads, keys, values = 4, 128, 128
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).cuda().bfloat16()

    q, k, v = draw(tokens, heads, keys), draw(tokens, heads, keys), draw(tokens, heads, values)
    g = -torch.rand(tokens, heads, decays, generator=generator).cuda()
    beta = draw(tokens, heads).sigmoid()
    state = torch.randn(heads, keys, values, generator=generator).cuda() / 16
    before = state.clone()
    want_out, want_state = delta_rule(q, k, v, g.double(), beta, state.double())
    out, after = run_delta_rule(q, k, v, g, beta, state)
    assert torch.equal(state, before)
    assert after.dtype == torch.float32
    for got, want in ((out, want_out), (after, want_state)):
        error = (got.double() - want).norm() / want.norm()
        assert error < 0.01, error
    torch.testing.assert_close(out.double(), want_out, atol=0.02, rtol=0.05)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "key_dim", "value_dim"), [(8, 2, 128, 128), (4, 4, 192, 128)]
)
@pytest.mark.parametrize(("queries", "prefix"), [(300, 0), (1024, 77), (2500, 3000), (128, 40_001)])
def test_attention_in_pieces_computes_what_the_definition_does(
    heads: int, kv_heads: int, key_dim: int, value_dim: int, queries: int, prefix: int
) -> None:
    """cuDNN and flash pieces in bf16, merged, against fp64 on the same rounded inputs."""
    generator = torch.Generator().manual_seed(queries)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).cuda().bfloat16()

    both = draw(queries, heads + kv_heads, key_dim)
    q, own_k = both[:, :heads], both[:, heads:]
    own_v = draw(queries, kv_heads, value_dim)
    k, v = draw(prefix, kv_heads, key_dim), draw(prefix, kv_heads, value_dim)
    if not fits(q, value_dim):
        pytest.skip("cuDNN's attention does not apply on this device")
    asked = []

    def prefix_keys(start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append((start, stop))
        return k[start:stop], v[start:stop]

    with torch.inference_mode():
        got = split_attention(q, own_k, own_v, prefix, prefix_keys, key_rows_max=8192)
    assert sum(stop - start for start, stop in asked) == prefix
    group = heads // kv_heads
    for head in range(heads):
        keys = torch.cat((k, own_k))[:, head // group].double()
        values = torch.cat((v, own_v))[:, head // group].double()
        scores = q[:, head].double() @ keys.T * key_dim**-0.5
        future = torch.ones_like(scores, dtype=torch.bool).triu(prefix + 1)
        want = scores.masked_fill(future, -torch.inf).softmax(-1) @ values
        error = (got[:, head].double() - want).norm() / want.norm()
        assert error < 0.006, error


def test_cuda_draws_what_the_cpu_draws() -> None:
    logits = torch.randn(32, 50_000, generator=torch.Generator().manual_seed(1)) * 3
    samplings = [Sampling(temperature=0.8, top_p=0.9, top_k=400, seed=seed) for seed in range(32)]
    tokens, logprobs = sample(logits, samplings, range(32))
    cuda_tokens, cuda_logprobs = sample(logits.cuda(), samplings, range(32))
    assert cuda_tokens.tolist() == tokens.tolist()
    torch.testing.assert_close(cuda_logprobs.cpu(), logprobs)


def test_long_prefix_needs_no_score_matrix(tmp_path: Path) -> None:
    """8,192 queries on 32,768 keys: materialized scores would take 16 GiB per layer."""
    shape = {
        "hidden_size": 1024,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 65_536,
    }
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("qwen3") | shape))
    spec = read_spec(tmp_path, "bfloat16")
    stage = load_stage(tmp_path, spec, 1, 3, device="cuda", load_format="dummy")
    store = stage.make_store(640, 64)
    batch = build_batch(
        [WaveChunk(rid=1, start=32_768, length=8192, tables=(tuple(range(640)),))], 64, "cuda"
    )
    inputs = {"hidden": torch.randn(8192, 1024, device="cuda", dtype=torch.bfloat16)}
    stage.forward(batch, inputs, store)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    hidden = stage.forward(batch, inputs, store)["hidden"]
    torch.cuda.synchronize()
    assert torch.isfinite(hidden).all()
    assert torch.cuda.max_memory_allocated() - before < 2 << 30


def test_single_tokens_decode_on_cuda(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "llama", seed=4)
    pipeline = Pipeline(folder, (0, 3, 5), device="cuda")
    text = PROMPT[:40]
    logits = pipeline.prefill(text, TABLE, [40])[-1]
    for _ in range(15):
        text = [*text, int(logits.argmax())]
        logits = pipeline.run([make_chunk(text, len(text) - 1, 1, TABLE)])[-1]
    text.append(int(logits.argmax()))
    assert text[40:] == Oracle(folder).greedy(PROMPT[:40], 16)
