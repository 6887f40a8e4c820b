"""`path=value` and merging."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavepp_worker.base.errors import ConfigError
from wavepp_worker.config.overrides import merge, override_tree, parse_override, parse_value

keys = st.text("abc", min_size=1, max_size=2)
trees = st.recursive(
    st.dictionaries(keys, st.integers(), max_size=3),
    lambda inner: st.dictionaries(keys, st.one_of(st.integers(), inner), max_size=3),
    max_leaves=6,
)


def leaves(tree: dict[str, Any], at: tuple[str, ...] = ()) -> dict[tuple[str, ...], int]:
    found: dict[tuple[str, ...], int] = {}
    for key, value in tree.items():
        found |= leaves(value, (*at, key)) if isinstance(value, dict) else {(*at, key): value}
    return found


@given(base=trees, update=trees)
def test_every_leaf_of_the_update_wins_and_nothing_is_invented(
    base: dict[str, Any], update: dict[str, Any]
) -> None:
    merged, old, new = leaves(merge(base, update)), leaves(base), leaves(update)
    assert merged.items() >= new.items()
    assert merged.items() <= {**old, **new}.items()
    assert merge(base, {}) == base
    assert merge({}, update) == update


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("0.5", 0.5), ("1e-3", 0.001), ("true", True), ("False", False), ("null", None),
     ("[1,2]", [1, 2]), ('"3"', "3"), ("cuda:0", "cuda:0"), ("", ""), ("~/m", "~/m")],
)  # fmt: skip
def test_values_are_json_or_text(text: str, value: Any) -> None:
    assert parse_value(text) == value


def test_paths_are_dotted_and_values_below_envs_stay_text() -> None:
    assert parse_override("A.b-c=1") == (("A", "b_c"), 1)
    assert parse_override("A.ServiceArgs.envs.MY-KEY=1") == (
        ("A", "ServiceArgs", "envs", "MY-KEY"),
        "1",
    )
    assert parse_override("a=b=c") == (("a",), "b=c")


@pytest.mark.parametrize("text", ["a.b", "=1", "a..b=1", ".a=1", ""])
def test_malformed_overrides_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_override(text)


def test_a_later_override_wins() -> None:
    tree = override_tree([(("a", "b"), 1), (("a", "c"), 2), (("a", "b"), 3)])
    assert tree == {"a": {"b": 3, "c": 2}}
