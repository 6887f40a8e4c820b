"""The commands that start nothing: dry run, check-config, print-schema, help, refusals."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import jsonschema
import pytest

from tests.numerics.tiny import make_tiny_model
from wavepp_worker import __version__
from wavepp_worker.base.errors import ConfigError
from wavepp_worker.cli import dynamo_main, main, split_overrides
from wavepp_worker.obs.timeline import open_recorder

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
DEMO = str(CONFIGS / "smollm2-cpu.yaml")
OVERLAY = str(CONFIGS / "etcd-nats.yaml")


@pytest.fixture(autouse=True)
def no_dynamo_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DYN_DEPLOYMENT_CONFIG", "DYNAMO_PORT", "DYNAMO_HOST", "DYNAMO_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)


def dry_run(capsys: pytest.CaptureFixture[str], *args: str) -> dict:
    assert dynamo_main(["serve", "graphs.disagg", "--dry-run", *args]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(list(args)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert all(line.startswith("error: ") for line in captured.err.splitlines())
    return captured.err


@pytest.mark.parametrize(
    ("words", "plain", "overrides"),
    [
        ("serve g --A.b=1 -f x", "serve g -f x", ["A.b=1"]),
        ("serve --A.b 1 g", "serve g", ["A.b=1"]),
        ("serve --A.b-c.D = x g", "serve g", ["A.b-c.D=x"]),
        ("serve --A.b=-1", "serve", ["A.b=-1"]),
        ("serve --set A.b=1 --port 3", "serve --set A.b=1 --port 3", []),
    ],
)
def test_overrides_of_dynamo_0_3(words: str, plain: str, overrides: list[str]) -> None:
    assert split_overrides(words.split()) == (plain.split(), overrides)


@pytest.mark.parametrize("words", ["--A.b", "--A.b -1", "--A.b --port"])
def test_an_override_needs_a_value(words: str) -> None:
    with pytest.raises(ConfigError, match=r"--A\.b: needs a value"):
        split_overrides(words.split())


def test_later_sources_win(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYNAMO_PORT", "8002")
    assert dry_run(capsys, "-f", DEMO)["config"]["Frontend"]["port"] == 8002
    config = dry_run(
        capsys, "-f", DEMO, "-f", OVERLAY, "--set", "Frontend.port=8003", "--port", "8004",
        "--PrefillWorker.ServiceArgs.workers=2",
    )["config"]  # fmt: skip
    assert config["Dynamo"]["discovery_backend"] == "etcd"
    assert config["Frontend"]["port"] == 8004
    assert config["PrefillWorker"]["ServiceArgs"]["workers"] == 2
    assert config["PrefillWorker"]["cluster"]["devices"] == ["cpu", "cpu"]


def test_the_environments_configuration_replaces_the_files(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = ("PrefillWorker", "DecodeWorker")
    text = "\n".join(f"{worker}: {{model: {{path: /other}}}}" for worker in workers)
    monkeypatch.setenv("DYN_DEPLOYMENT_CONFIG", text)
    config = dry_run(capsys, "-f", "missing.yaml")["config"]
    assert config["DecodeWorker"]["model"]["path"] == "/other"


def test_one_service_ignores_the_sections_of_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    processes = dry_run(capsys, "-f", DEMO, "--service-name", "DecodeWorker")["processes"]
    assert [process["name"] for process in processes] == ["DecodeWorker"]
    assert "components.decode_worker" in processes[0]["command"]


def test_nothing_starts_without_a_model_folder_or_with_a_taken_port(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        lines = refused(
            capsys, "serve", "graphs.disagg", "-f", DEMO, "--port", str(taken.getsockname()[1]),
            "--set", f"Common.model.path={tmp_path / 'none'}",
        )  # fmt: skip
    assert "Frontend.port: cannot listen on" in lines
    assert re.search(rf"PrefillWorker: .*{tmp_path / 'none'}", lines)


@pytest.mark.parametrize(("text", "why"), [(None, "not found"), ('{"a"', "not a JSON object")])
def test_nothing_starts_without_a_whole_tokenizer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str | None, why: str
) -> None:
    make_tiny_model(tmp_path)
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.unlink() if text is None else tokenizer.write_text(text)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    lines = refused(
        capsys, "serve", "graphs.disagg", "-f", DEMO, "--port", str(port),
        "--set", f"Common.model.path={tmp_path}",
    )  # fmt: skip
    assert f"PrefillWorker: {tokenizer}: {why}" in lines
    assert f"DecodeWorker: {tokenizer}: {why}" in lines


def test_services_that_do_not_answer_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    lines = refused(
        capsys, "serve", "graphs.disagg", "-f", DEMO, "-f", OVERLAY, "--port", str(port),
        f"--Dynamo.etcd_endpoints=http://127.0.0.1:{port}", f"--Dynamo.nats_server=nats://127.0.0.1:{port}",
    )  # fmt: skip
    assert f"Dynamo.etcd_endpoints: no etcd answers at http://127.0.0.1:{port}" in lines
    assert f"Dynamo.nats_server: no NATS answers at nats://127.0.0.1:{port}" in lines


MODEL = "model: {path: /m}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            MODEL + "cache: {blok_tokens: 3}",
            'blok_tokens: unknown key, did you mean "block_tokens"?',
        ),
        (MODEL + "cache: {block_tokens: x}", "cache.block_tokens: expected int, got str"),
        (MODEL + "planner: {wave_tokens_max: 3}", "must be a multiple of cache.block_tokens"),
        ("Frontend: {prot: 1}", 'Frontend.prot: unknown key, did you mean "port"?'),
        ("Fronted: {}", 'Fronted: unknown section, did you mean "Frontend"?'),
    ],
)
def test_check_config_refuses(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    line = refused(capsys, "check-config", str(file))
    assert message in line


def test_check_config_accepts_graphs_and_worker_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    worker = tmp_path / "worker.yaml"
    worker.write_text("model: {path: /m}\n")
    assert main(["check-config", DEMO, OVERLAY]) == 0
    assert main(["check-config", str(worker)]) == 0
    out = capsys.readouterr().out
    assert "a valid configuration of graphs.disagg" in out
    assert "a valid worker configuration" in out


def test_shipped_files_match_the_shipped_schema() -> None:
    import yaml

    schema = json.loads((CONFIGS / "schema.json").read_text())
    for file in CONFIGS.glob("*.yaml"):
        jsonschema.validate(yaml.safe_load(file.read_text()), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"Frontend": {"prot": 1}}, schema)


def test_schema_explains_every_described_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["print-schema", "--worker"]) == 0
    schema = json.loads(capsys.readouterr().out)
    block = schema["$defs"]["CacheConfig"]["properties"]["block_tokens"]
    assert block["default"] == 64
    assert block["description"].startswith("B. The router and the decode worker")
    assert schema["required"] == ["model"]


def test_help_teaches_by_example(capsys: pytest.CaptureFixture[str]) -> None:
    for entry, command in ((main, "wavepp serve"), (dynamo_main, "dynamo serve")):
        with pytest.raises(SystemExit) as caught:
            entry(["serve", "--help"])
        assert caught.value.code == 0
        assert f"{command} graphs.disagg -f configs/smollm2-cpu.yaml" in capsys.readouterr().out
    assert main(["version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


def test_trace_out_has_the_parts_written_beside_the_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = dry_run(capsys, "-f", DEMO, "--trace-out", str(tmp_path / "a #: b.json"))["config"]
    assert config["PrefillWorker"]["obs"]["trace_folder"] == str(tmp_path / "a #: b.json.parts")
    assert dry_run(capsys, "-f", DEMO)["config"]["PrefillWorker"]["obs"]["trace_folder"] == ""


def test_a_trace_that_cannot_be_written_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    missing = str(tmp_path / "missing" / "t.json")
    text = refused(capsys, "serve", "graphs.disagg", "-f", DEMO, "--trace-out", missing)
    assert "is no folder" in text
    standin = "tests.integration.standin_graph"
    text = refused(capsys, "serve", standin, "--trace-out", str(tmp_path / "t.json"))
    assert "no prefill worker" in text
    text = refused(capsys, "timeline", str(tmp_path), str(tmp_path / "t.json"))
    assert "no parts of a timeline" in text
    text = refused(capsys, "bench", "serve", "--url", "http://x/v1", "--trace-out", "t.json")
    assert "--trace-out needs a graph of its own" in text


def test_parts_of_a_run_become_a_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    made = open_recorder(str(tmp_path / "parts"), worker=1, role="loop")
    assert made is not None
    made.instant("requests", "install", 1.0)
    made.close()
    assert main(["timeline", str(tmp_path / "parts"), str(tmp_path / "t.json")]) == 0
    assert "1 events of 1 processes" in capsys.readouterr().out
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
