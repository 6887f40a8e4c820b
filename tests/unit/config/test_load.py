"""Configuration files: what is accepted, and how a refusal names its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from wavepp_worker.base.errors import ConfigError
from wavepp_worker.config.load import convert, load_config, parse_source, read_override, read_source
from wavepp_worker.config.schema import Config

MODEL = "model: {path: /m}\n"


def refusal(text: str, *sets: str) -> str:
    source = read_override(sets).over(parse_source(text, "f.yaml"))
    with pytest.raises(ConfigError) as caught:
        convert(source, Config)
    return str(caught.value)


def accepted(text: str, *sets: str) -> Config:
    return convert(read_override(sets).over(parse_source(text, "f.yaml")), Config)


def test_defaults_fill_what_the_file_leaves_out() -> None:
    config = accepted(MODEL)
    assert (config.model.path, config.cluster.stages, config.cache.block_tokens) == ("/m", 2, 64)


def test_kebab_case_is_the_same_key() -> None:
    assert accepted(MODEL + "cache: {block-tokens: 32}").cache.block_tokens == 32


def test_exponents_without_a_dot_are_numbers() -> None:
    assert accepted(MODEL + "cache: {floor_fraction: 1e-1}").cache.floor_fraction == 0.1


def test_all_unknown_keys_are_listed_with_line_and_nearest_name() -> None:
    text = "model: {path: /m, sed: 1}\ncahce: {}\ncache:\n  block_token: 3\n"
    assert refusal(text).splitlines() == [
        'f.yaml:1: model.sed: unknown key, did you mean "seed"?',
        'f.yaml:2: cahce: unknown key, did you mean "cache"?',
        'f.yaml:4: cache.block_token: unknown key, did you mean "block_tokens"?',
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cache: {block_tokens: big}", "f.yaml:2: cache.block_tokens: expected int, got str"),
        ("cache: {block_tokens: 0}", "f.yaml:2: cache.block_tokens: expected int >= 1"),
        ("cluster: {devices: [1]}", "f.yaml:2: cluster.devices[0]: expected str, got int"),
        ("cache: 3", "f.yaml:2: cache: expected object, got int"),
        (
            "cache: {block_tokens: 1, block-tokens: 2}",
            "f.yaml:2: cache.block_tokens: appears twice",
        ),
        ("cache: {1: 2}", "f.yaml:2: cache.1: keys must be text"),
        ("cache: [", "f.yaml: not valid YAML: "),
        ("a: &a\n  b: *a", "f.yaml:2: nested deeper than 16 levels"),
        ("debug: {invariants: on}", "f.yaml:2: debug.invariants: expected str, got bool"),
        ("debug: {invariants: x}", "f.yaml:2: debug.invariants: must be one of off, idle, always"),
        (
            "decode_pool: {kind: vllm-push, block_tokens: 48}",
            "decode_pool.block_tokens (48) must divide cache.block_tokens (64)",
        ),
        (
            "decode_pool: {kind: vllm-push, block_tokens: 16}",
            "decode_pool.block_tokens (16) must be a multiple of 32",
        ),
        (
            "decode_pool: {kind: vllm-push, staging_tokens: 63}",
            "decode_pool.staging_tokens (63) must hold a block of 64",
        ),
        (
            "cluster: {first_host_stages: 1, group: g, join_port: 7}\n"
            "decode_pool: {kind: vllm-push}",
            "decode_pool.model must be given with stages on several hosts",
        ),
        ("planner: {wave_tokens_max: 100}", "planner.wave_tokens_max (100) must be a multiple of"),
        ("admission: {mode: naive}", "admission.mode naive needs planner.kind greedy"),
        ("cache: {host_tokens: 100}", "cache.host_tokens (100) must be a multiple of"),
        ("cache: {host_tokens: -64}", "f.yaml:2: cache.host_tokens: "),
        (
            "cache: {snapshot_interval_tokens: 96}",
            "cache.snapshot_interval_tokens (96) must be a multiple of cache.block_tokens (64)",
        ),
        ("cluster: {devices: [cpu]}", "cluster.devices names 1 devices for cluster.stages = 2"),
        ("cluster: {first_host_stages: 3}", "cluster.first_host_stages (3) exceeds"),
        ("cluster: {first_host_stages: 1, group: g}", "cluster.first_host_stages leaves stages to"),
    ],
)
def test_refusals_name_the_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        accepted(MODEL + text)
    assert str(caught.value).startswith(message)


def test_a_missing_model_is_named() -> None:
    assert refusal("cluster: {stages: 1}") == '"model" is required here and has no default'
    assert (
        refusal("model: {seed: 1}") == 'f.yaml:1: model: "path" is required here and has no default'
    )


def test_overrides_are_merged_before_validation_and_blamed_on_the_command_line() -> None:
    assert (
        accepted(MODEL, "cache.block-tokens=32", "planner.wave_tokens_max=64").cache.block_tokens
        == 32
    )
    assert refusal(MODEL, "cache.block_tokens=x") == (
        "command line: cache.block_tokens: expected int, got str"
    )
    assert refusal(MODEL, "cache.blok_tokens=1").startswith(
        "command line: cache.blok_tokens: unknown"
    )


def test_json_is_read_too_and_missing_files_are_named(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text('{"model": {"path": "/m"}, "cluster": {"stages": 3}}')
    assert load_config(file, ["cluster.stages=4"]).cluster.stages == 4
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file"):
        read_source(tmp_path / "none.yaml")
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_source(file)


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_an_empty_file_is_an_empty_tree(text: str) -> None:
    assert parse_source(text, "f").tree == {}


def test_a_list_at_the_top_is_refused() -> None:
    with pytest.raises(ConfigError, match="f: expected sections"):
        parse_source("- 1\n", "f")


def test_yaml_merges_give_way_to_the_sections_own_keys() -> None:
    text = "a: &a {x: 1, y: 2}\nb:\n  <<: *a\n  x: 3\n"
    assert parse_source(text, "f").tree["b"] == {"x": 3, "y": 2}
