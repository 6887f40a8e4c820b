"""Every invariant, every scenario that broke an earlier draft, and every field scenario of level
L1 is named by a test: in a docstring, a comment, a test's name, or a message "[I16]".

    I1 .. I49   invariants of the algorithms
    S1 .. S17   scenarios that broke earlier drafts of them
    FS-40 ..    what went wrong in practice with engines of this kind

A key that no test names must be listed here with the reason, and a reason ends with its first test.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
WRITTEN = re.compile(r"\b(?:I[1-9]\d?|S[1-9]\d?|FS-\d+)\b")
BRACKETED = re.compile(r"\[((?:[ISA]\d+|FS-\d+)(?:, ?(?:[ISA]\d+|FS-\d+))*)\]")
IN_NAME = re.compile(r"^test_([is]\d+)_")

INVARIANTS = [f"I{number}" for number in range(1, 50)]
BROKE_DRAFTS = [f"S{number}" for number in range(1, 18)]
FIELD_L1 = [f"FS-{number}" for number in (*range(40, 55), *range(74, 90))]

EXEMPT: dict[str, str] = {
    "FS-45": "the share of a wave that one request may take belongs to the planner's own tests",
    "FS-46": "how many waves are in the ring is measured with the planner's pipeline model",
    "FS-50": "eviction goes by age alone; only prefixes in use are protected from a scan",
    "FS-77": "the queue to the router and what it drops are Dynamo's publisher's",
    "FS-83": "addresses and ports of the event plane are Dynamo's",
}


def docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ""
            if named := IN_NAME.match(getattr(node, "name", "")):
                yield named[1].upper()


def named_keys(source: str) -> set[str]:
    """Return the keys that one file names."""
    keys: set[str] = set()
    for text in docstrings(ast.parse(source)):
        keys.update(WRITTEN.findall(text))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            keys.update(WRITTEN.findall(token.string))
        elif token.type == tokenize.STRING:
            for group in BRACKETED.findall(token.string):
                keys.update(key.strip() for key in group.split(","))
    return keys


def all_named() -> set[str]:
    return {
        key
        for path in TESTS.rglob("*.py")
        if path != Path(__file__).resolve()
        for key in named_keys(path.read_text())
    }


def test_what_counts_as_naming_a_key() -> None:
    source = '''
"""Module of I1 and [I2, S3], not of I8x or I4-I6's middle."""
NUMPY = "I9"  # I10
def test_s11_of_a_draft():
    """FS-12"""
    assert x, "told [I13]"
'''
    found = named_keys(source)
    assert found == {"I1", "I2", "S3", "I4", "I6", "I10", "S11", "FS-12", "I13"}


def test_every_key_is_named_by_a_test_or_exempt_for_a_reason() -> None:
    named = all_named()
    wanted = [*INVARIANTS, *BROKE_DRAFTS, *FIELD_L1]
    assert [key for key in wanted if key not in named and key not in EXEMPT] == []
    assert [key for key in EXEMPT if key in named] == [], "these have a test now"
    assert set(EXEMPT) <= set(wanted)
    assert all(len(reason) > 20 for reason in EXEMPT.values())
