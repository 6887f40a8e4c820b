"""Graph + configuration → settings, process plans and environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from graphs.deployment import Deployment, Folders, ProcessPlan, deploy, process_plans
from graphs.resolve import resolve
from wavepp_worker.base.errors import ConfigError
from wavepp_worker.config.load import parse_source

GRAPH = resolve("graphs.disagg", Path())
FOLDERS = Folders(config="/run/c", store="/run/s", temporary="/run/t")
BASE = """
Common: {model: {path: /m/tiny}}
PrefillWorker: {common-configs: [model]}
DecodeWorker: {common_configs: [model]}
"""


def deployed(text: str) -> Deployment:
    return deploy(GRAPH, parse_source(text, "g.yaml"))


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        deployed(text)
    return str(caught.value)


def plans(
    text: str, environment: dict[str, str] | None = None, gpus: list[str] | None = None
) -> list[ProcessPlan]:
    return process_plans(
        deployed(text),
        FOLDERS,
        environment=environment or {},
        gpus=gpus,
        system_ports=iter(range(100, 200)),
        import_root="/work",
    )


def with_args(component: str, args: str) -> str:
    return BASE.replace(f"{component}: {{", f"{component}: {{ServiceArgs: {args}, ")


def with_keys(component: str, keys: str) -> str:
    return BASE.replace(f"{component}: {{", f"{component}: {{{keys}, ")


def test_common_keys_reach_subscribers_and_give_way_to_their_own() -> None:
    common = BASE.replace("/m/tiny", "/m/tiny, seed: 1")
    text = common.replace("DecodeWorker: {", "DecodeWorker: {model: {seed: 2}, ")
    deployment = deployed(text + "Frontend: {port: 8001}")
    prefill, decode = (deployment.settings[n].model for n in ("PrefillWorker", "DecodeWorker"))
    assert (prefill.path, prefill.seed) == ("/m/tiny", 1)
    assert (decode.path, decode.seed) == ("/m/tiny", 2)
    assert deployment.frontend() == ("127.0.0.1", 8001)
    assert deployment.model_names() == ("tiny",)


ARGS = "PrefillWorker.ServiceArgs"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BASE + "PrefilWorker: {}", "PrefilWorker: unknown section, did you mean"),
        (BASE + "Frontend: 3", "Frontend: expected keys below it, got 3"),
        (BASE + "Dynamo: {request_plane: udp}", "Dynamo.request_plane: must be one of tcp, nats;"),
        (BASE + "Dynamo: {discovery_backend: mem}", 'Dynamo.discovery_backend: "mem" is seen by'),
        (BASE.replace("[model]", "[modle]", 1), 'PrefillWorker.common_configs: Common has no "mod'),
        (BASE.replace("[model]", "model", 1), "PrefillWorker.common_configs: expected a list"),
        (BASE.replace("path: /m", "pth: /m"), "PrefillWorker.model.pth: unknown key"),
        (BASE + "Frontend: {ServiceArgs: {workers: 2}}", "Frontend.ServiceArgs.workers: must be 1"),
        (with_args("PrefillWorker", "{worker: 2}"), f"{ARGS}.worker: unknown key"),
        (with_args("PrefillWorker", "{workers: -1}"), f"{ARGS}.workers: expected int >= 0"),
        (with_args("PrefillWorker", "3"), f"{ARGS}: expected object, got int"),
    ],
)
def test_refusals_name_the_line_and_the_path(text: str, message: str) -> None:
    place, _, rest = refusal(text).partition(": ")
    assert place.startswith("g.yaml:")
    assert rest.startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (with_args("PrefillWorker", "{resources: {gpu: 1}}"), f"{ARGS}.resources.gpu (1) is less"),
        (
            with_keys("DecodeWorker", "block_tokens: 16"),
            "DecodeWorker.block_tokens (16) must equal",
        ),
        (with_keys("DecodeWorker", "served_model_name: x"), "PrefillWorker serves the model as"),
        (with_keys("DecodeWorker", "model: {dtype: float16}"), "PrefillWorker.model.dtype (auto)"),
        ("{}", 'PrefillWorker: "model" is required here and has no default'),
    ],
)
def test_settings_that_do_not_fit_each_other_are_refused(text: str, message: str) -> None:
    assert message in refusal(text)


def test_the_mistakes_of_all_sections_come_together() -> None:
    text = with_keys("DecodeWorker", "devise: cpu") + "Frontend: {prot: 1}\nDynamo: {namespce: x}"
    assert [line.split(": ")[1] for line in refusal(text).splitlines()] == [
        "Frontend.prot", "DecodeWorker.devise", "Dynamo.namespce",
    ]  # fmt: skip


def test_one_plan_per_worker_in_starting_order() -> None:
    found = plans(with_args("PrefillWorker", "{workers: 2}"))
    assert [plan.name for plan in found] == [
        "DecodeWorker", "PrefillWorker-1", "PrefillWorker-2", "Frontend",
    ]  # fmt: skip
    assert found[1].command[1:] == (
        "-m",
        "components.prefill_worker",
        "--config",
        "/run/c/PrefillWorker.json",
    )
    assert found[3].command[1:] == (
        "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", "8000",
        "--router-mode", "kv", "--migration-limit", "2",
    )  # fmt: skip
    assert [plan.env["DYN_SYSTEM_PORT"] for plan in found] == ["100", "101", "102", "-1"]


def test_planes_become_dynamos_variables() -> None:
    env = plans(BASE)[0].env
    assert env.items() >= {
        "DYN_DISCOVERY_BACKEND": "file", "DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq",
        "DYN_NAMESPACE": "dynamo", "DYN_FILE_KV": "/run/s", "TMPDIR": "/run/t",
        "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "DYN_TCP_RPC_HOST": "127.0.0.1",
    }.items()  # fmt: skip
    cluster = "discovery_backend: etcd, etcd_endpoints: 'http://e:1', nats_server: 'nats://n:2'"
    env = plans(BASE + f"Dynamo: {{{cluster}}}")[0].env
    assert (env["ETCD_ENDPOINTS"], env["NATS_SERVER"]) == ("http://e:1", "nats://n:2")
    assert not {"DYN_FILE_KV", "DYN_TCP_RPC_HOST"} & set(env)


def test_the_users_environment_beats_defaults_and_envs_beat_all() -> None:
    text = with_args("PrefillWorker", "{envs: {DYN_NAMESPACE: mine, N: 3, T: true}}")
    decode, prefill, _ = plans(text, {"OMP_NUM_THREADS": "4", "PYTHONPATH": "/p"})
    assert "OMP_NUM_THREADS" not in prefill.env
    assert prefill.env["PYTHONPATH"] == "/work:/p"
    assert [prefill.env[key] for key in ("DYN_NAMESPACE", "N", "T")] == ["mine", "3", "true"]
    assert decode.env["DYN_NAMESPACE"] == "dynamo"


def test_the_users_metrics_port_is_asked_for_health_and_counted_up() -> None:
    found = plans(with_args("PrefillWorker", "{workers: 2, envs: {DYN_SYSTEM_PORT: 9100}}"))
    mine = [plan for plan in found if plan.component.name == "PrefillWorker"]
    assert [plan.system_port for plan in mine] == [9100, 9101]
    assert [plan.env["DYN_SYSTEM_PORT"] for plan in mine] == ["9100", "9101"]


@pytest.mark.parametrize("port", ["32768", "0", "off"])
def test_a_metrics_port_that_dynamo_cannot_use_is_refused(port: str) -> None:
    text = with_args("PrefillWorker", f"{{envs: {{DYN_SYSTEM_PORT: '{port}'}}}}")
    with pytest.raises(ConfigError, match=r"ServiceArgs\.envs\.DYN_SYSTEM_PORT"):
        plans(text)


def test_gpus_are_distinct_and_never_promised_twice() -> None:
    text = with_args("PrefillWorker", "{workers: 2, resources: {gpu: '2'}}")
    visible = [plan.env.get("CUDA_VISIBLE_DEVICES") for plan in plans(text, gpus=list("01234"))]
    assert visible == [None, "0,1", "2,3", None]
    assert all("CUDA_VISIBLE_DEVICES" not in plan.env for plan in plans(text, gpus=None))
    with pytest.raises(ConfigError, match="process 2 wants 2 GPUs, 1 of 3 are left"):
        plans(text, gpus=list("012"))


def test_the_resolved_tree_is_itself_a_configuration() -> None:
    deployment = deployed(with_args("PrefillWorker", "{workers: 2, envs: {A: b}}"))
    tree: dict[str, Any] = deployment.resolved()
    again = deploy(GRAPH, parse_source(json.dumps(tree), "again"))
    assert (again.settings, again.args, again.dynamo) == (
        deployment.settings, deployment.args, deployment.dynamo,
    )  # fmt: skip
