"""deploy/: the manifests against the schemas of Kubernetes, and against what the server does."""

from __future__ import annotations

import configparser
import json
import os
import re
import socket
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from tests.deployed import (
    DEPLOY,
    KUBERNETES,
    container,
    dockerfile,
    documents,
    entrypoint,
    health_check,
    instruction,
    one,
    pod_templates,
)
from tp_engine.config import EngineConfig
from tp_engine.options import parse_options
from tp_engine.server.app import create_app
from tp_engine.server.config import ServerConfig
from tp_engine.server.lifecycle import _LEAVE_S
from tp_engine.server.main import _tell_systemd
from tp_engine.server.state import ServerState

VERSIONS = ("1.32", "1.37")  # the oldest and the newest that are checked
TABLES = {"engine": EngineConfig, "server": ServerConfig}


def strict(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    """An object with these properties and no others."""
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


TEXT, NUMBER, ANY = {"type": "string"}, {"type": "integer", "minimum": 1}, {"type": "object"}
EXPRESSION = strict(
    {"key": TEXT, "operator": {"enum": ["In", "NotIn", "Exists", "DoesNotExist"]}},
    {"values": {"type": "array", "items": TEXT}},
)
# The fields that the definitions of these two kinds have, as far as they are used here.
DEFINITIONS = {
    "LeaderWorkerSet": strict(
        {
            "apiVersion": {"const": "leaderworkerset.x-k8s.io/v1"},
            "kind": TEXT,
            "metadata": ANY,
            "spec": strict(
                {
                    "replicas": NUMBER,
                    "leaderWorkerTemplate": strict(
                        {
                            "size": NUMBER,
                            "restartPolicy": {"enum": ["RecreateGroupOnPodRestart", "None"]},
                            "leaderTemplate": ANY,
                            "workerTemplate": ANY,
                        }
                    ),
                }
            ),
        }
    ),
    "PodMonitor": strict(
        {
            "apiVersion": {"const": "monitoring.coreos.com/v1"},
            "kind": TEXT,
            "metadata": ANY,
            "spec": strict(
                {
                    "selector": strict({"matchExpressions": {"type": "array", "items": EXPRESSION}}),
                    "podMetricsEndpoints": {
                        "type": "array",
                        "items": strict({"port": TEXT, "path": TEXT, "interval": {"pattern": "^[0-9]+s$"}}),
                    },
                }
            ),
        }
    ),
}


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_are_valid(version: str) -> None:
    """Oracle: the strict schemas of Kubernetes; for kinds that it does not know, the schemas above."""
    for path in KUBERNETES:
        for document in documents(path):
            if document["kind"] in DEFINITIONS:
                jsonschema.validate(document, DEFINITIONS[document["kind"]])
            else:
                kubernetes_validate.validate(document, version, strict=True)
    for maker, template in pod_templates().items():
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": maker}, "template": template}
        kubernetes_validate.validate(pod, version, strict=True)


def test_a_wrong_field_is_found() -> None:
    """Oracle: misspelt fields, of a pod and of the schemas above."""
    template = json.loads(json.dumps(pod_templates()["leader"]))
    template["spec"]["containers"][0]["readynessProbe"] = {}
    pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template}
    with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
        kubernetes_validate.validate(pod, VERSIONS[-1], strict=True)
    monitor = one("PodMonitor")
    with pytest.raises(jsonschema.ValidationError, match="selectors"):
        jsonschema.validate({**monitor, "spec": {**monitor["spec"], "selectors": {}}}, DEFINITIONS["PodMonitor"])


def test_selectors_find_the_pods_and_ports() -> None:
    """Oracle: the labels and the named ports of the pods."""
    templates = pod_templates()
    labels = {maker: template["metadata"]["labels"] for maker, template in templates.items()}
    services = {service["metadata"]["name"]: service for path in KUBERNETES for service in documents(path)
                if service["kind"] == "Service"}  # fmt: skip
    for name, maker in (("tp-engine", "deployment"), ("tp-engine-hosts", "leader")):
        chosen = [each for each, has in labels.items() if services[name]["spec"]["selector"].items() <= has.items()]
        assert chosen == [maker]
        assert services[name]["spec"]["ports"][0]["targetPort"] == container(maker)["ports"][0]["name"]
    assert one("Deployment")["spec"]["selector"]["matchLabels"].items() <= labels["deployment"].items()
    monitored = one("PodMonitor")["spec"]["selector"]["matchExpressions"][0]
    assert {each[monitored["key"]] for each in labels.values()} == set(monitored["values"])
    assert one("PodMonitor")["spec"]["podMetricsEndpoints"][0]["port"] == container("leader")["ports"][0]["name"]
    assert "ports" not in container("worker")


@pytest.mark.parametrize("maker", ["deployment", "leader", "worker"])
def test_the_drain_fits_the_grace_period(maker: str) -> None:
    """Oracle: preStop, then the server's own time for running requests and for its ranks, with 10 s to spare."""
    before_s = int(container(maker)["lifecycle"]["preStop"]["exec"]["command"][1])
    (drain_s,) = (float(word.split("=")[1]) for word in words(maker) if word.startswith("--shutdown-timeout-s="))
    assert before_s + drain_s + _LEAVE_S + 10 <= pod_templates()[maker]["spec"]["terminationGracePeriodSeconds"]
    volumes = {volume["name"]: volume for volume in pod_templates()[maker]["spec"]["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in container(maker)["volumeMounts"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert "/data" in mounts and f"{mounts['/data']}" in volumes


def words(maker: str) -> list[str]:
    """The options of the server in a pod."""
    found = container(maker)
    if "command" not in found:
        return entrypoint()[2:] + list(found["args"])
    return list(found["command"][found["command"].index("serve") + 1 :])


@pytest.mark.parametrize("maker", ["deployment", "leader", "worker"])
def test_the_server_takes_the_options(maker: str) -> None:
    """Oracle: the server's own parser; the port is that of the manifest, and the dashboard's names are there."""
    options = parse_options("serve", "", TABLES, words(maker))
    options.build("engine", EngineConfig)
    server = options.build("server", ServerConfig)
    assert server.host == "0.0.0.0" and set(server.metrics_prefix) == {"tp_engine", "vllm"}
    ports = container(maker).get("ports", [{"containerPort": 8000}])
    assert [port["containerPort"] for port in ports] == [server.port]
    assert container(maker)["resources"]["limits"]["nvidia.com/gpu"] == "8"


@pytest.mark.parametrize("maker", ["deployment", "leader"])
def test_probes_ask_what_the_server_answers(maker: str) -> None:
    """Oracle: the server's routes, and the table of probes in docs/quickstart.md."""
    state = ServerState(ServerConfig(), ("demo",))
    try:
        paths = create_app(state).openapi()["paths"].keys()
    finally:
        state.preparing.close()
    probes = {name: container(maker)[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/health", "liveness": "/live", "readiness": "/ready"
    }  # fmt: skip
    assert {probe["path"] for probe in probes.values()} <= paths
    assert {probe["port"] for probe in probes.values()} == {container(maker)["ports"][0]["name"]}


def test_the_dockerfile() -> None:
    """Oracle: the stages that its comments name, the files that it copies, the port of its entry point; the image for
    CPUs has no compiler."""
    words_of = [(word, arguments.split()) for word, arguments in dockerfile()]
    stages = {rest[2]: rest[0] for word, rest in words_of if word == "FROM"}
    assert list(stages) == ["wheel", "packages", "base", "cpu", "cuda"]
    assert stages["cpu"] == stages["cuda"] == "base" and stages["base"] == stages["wheel"] != "wheel"
    text = (DEPLOY / "docker" / "Dockerfile").read_text(encoding="utf-8")
    assert "gcc" not in text[text.index(" AS base") : text.index(" AS cuda")]
    copied = [
        name for word, rest in words_of if word == "COPY" and not rest[0].startswith("--from=") for name in rest[:-1]
    ]
    assert all((DEPLOY.parent / name).exists() for name in copied)
    ignored = (DEPLOY / "docker" / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert set(copied) == {line[1:] for line in ignored if line.startswith("!")}
    port = entrypoint()[entrypoint().index("--port") + 1]
    assert instruction("EXPOSE") == port and f":{port}/health" in health_check()[-1]
    assert [rest for word, rest in words_of if word == "USER"] == [["tp_engine"], ["tp_engine"]]


@pytest.mark.parametrize(
    "name", ["docker/Dockerfile", "compose.cuda.yaml", "kubernetes/deployment.yaml", "kubernetes/leaderworkerset.yaml"]
)
def test_compiled_kernels_outlive_a_container(name: str) -> None:
    """Oracle: Triton's own variable names a folder of the volume; without it each start compiles all kernels anew."""
    text = (DEPLOY / name).read_text(encoding="utf-8")
    assert re.search(r"TRITON_CACHE_DIR(=|: |, value: )/data/", text)


def test_compose() -> None:
    """Oracle: the files that the services mount, the stages of the Dockerfile, and the server's own parser."""
    (compose,), (cuda,) = documents(DEPLOY / "compose.yaml"), documents(DEPLOY / "compose.cuda.yaml")
    stages = {arguments.split()[2] for word, arguments in dockerfile() if word == "FROM"}
    for server in (compose["services"]["server"], cuda["services"]["server"]):
        assert server["build"]["target"] in stages
        parse_options("serve", "", TABLES, entrypoint()[2:] + server["command"]).build("server", ServerConfig)
    mounted = [volume.split(":")[0] for service in ("prometheus", "grafana")
               for volume in compose["services"][service]["volumes"]]  # fmt: skip
    assert all((DEPLOY / name).resolve().is_file() for name in mounted)
    assert (DEPLOY / compose["services"]["server"]["build"]["context"]).resolve() == DEPLOY.parent
    (prometheus,) = documents(DEPLOY / "monitoring" / "prometheus.yaml")
    assert prometheus["scrape_configs"][0]["static_configs"][0]["targets"] == ["server:8000"]
    (provider,) = documents(DEPLOY / "monitoring" / "grafana_dashboards.yaml")
    folder = provider["providers"][0]["options"]["path"]
    assert any(volume.split(":")[1].startswith(folder) for volume in compose["services"]["grafana"]["volumes"])


def test_the_systemd_unit() -> None:
    """Oracle: systemd's names; the time to stop covers the drain, and the options are the server's."""
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "systemd" / "tp-engine.service")
    service = unit["Service"]
    assert service["Type"] == "notify" and service["NotifyAccess"] == "all"
    command = service["ExecStart"].split()
    assert command[0].endswith("/tp-engine") and command[1:3] == ["serve", "--config"]
    server = parse_options("serve", "", TABLES, command[4:]).build("server", ServerConfig)
    assert server.shutdown_timeout_s + _LEAVE_S + 10 <= int(service["TimeoutStopSec"])


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_is_told(abstract: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: sd_notify(3): a datagram per state; in NOTIFY_SOCKET, @ stands for the zero byte of an abstract name."""
    name = f"tp_engine_{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind("\0" + name if abstract else name)
        told.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name if abstract else name)
        _tell_systemd("READY=1")
        _tell_systemd("STOPPING=1")
        assert [told.recv(100), told.recv(100)] == [b"READY=1", b"STOPPING=1"]


def test_a_server_without_systemd_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Oracle: the log: a socket that is gone is named there, and without a name nothing is said."""
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    _tell_systemd("READY=1")
    assert not caplog.records
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    _tell_systemd("READY=1")
    assert f"NOTIFY_SOCKET {tmp_path}/gone" in caplog.text
