"""The chart: what its schema refuses, what Helm renders, and that clusters would take it."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import dist
import jsonschema
import kvdepot
import manifests
import pytest
import yaml
from kvdepot.vllm import settings as vllm_settings

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/kvdepot"
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
# As Helm reads it.
VALIDATOR = jsonschema.Draft7Validator(SCHEMA)

Values = dict[str, Any]

PEER = {"etcd": "http://etcd-0:2379,http://etcd-1:2379", "tokenSecret": "kvdepot-token"}
ENGINE = {"enabled": True, "model": "Qwen/Qwen3-8B"}
OWN = {**ENGINE, "mode": "own"}


def server(**changed: Any) -> Values:
    """Values that differ from the chart's in these of the server."""
    return {"server": changed}


def engine(**changed: Any) -> Values:
    """Values with an engine."""
    return {"engine": {**ENGINE, **changed}}


GOOD: dict[str, Values] = {
    "as it is": {},
    "attached": engine(),
    "own": {"server": {"enabled": False}, "engine": {**OWN, "connector": {"salt": "a"}}},
    "own, claim": {"engine": {**OWN, "arena": {"type": "claim", "claim": "arena"}}},
    "the platform's user": {"uid": None, "server": {"prepare": False}, "engine": ENGINE},
    "old kernel": server(hostPID=True),
    "memory alone": server(tiers=["Cache"]),
    "Dax, ephemeral": server(tiers=["Cache", "Dax"], arena={"type": "ephemeral"}),
    "Nvme alone, emptyDir": server(tiers=["Nvme"], arena={"type": "emptyDir"}),
    "Posix": server(tiers=["Cache", "Posix"], posix={"claim": "shared"}, macKeySecret="macs"),
    "S3": server(tiers=["Cache", "Nvme", "S3"], s3={"url": "s3://bucket/kv", "secret": "keys"}),
    "Peer": server(tiers=["Cache", "Peer"], peer=PEER),
    "options": server(options={"lanes": 8, "nvme": {"records": 57_000_000}}),
}

# Values that cannot work -> the place of the rule that says so.
BAD: dict[str, tuple[Values, str]] = {
    "root": ({"uid": 0}, "uid"),
    "no user to give the directories to": ({"uid": None}, "server.prepare"),
    "no server to attach to": ({**engine(), **server(enabled=False)}, "server.enabled"),
    "nothing at all": (server(enabled=False), "engine.enabled"),
    "no model": ({"engine": {"enabled": True}}, "engine.model"),
    "an unknown tier": (server(tiers=["Cache", "Tape"]), "server.tiers.1"),
    "no tier": (server(tiers=[]), "server.tiers"),
    "one tier twice": (server(tiers=["Cache", "Cache"]), "server.tiers"),
    "two arenas": (server(tiers=["Cache", "Dax", "Nvme"]), "server"),
    "Cache below": (server(tiers=["Nvme", "Cache"]), "server.tiers.0"),
    "an asynchronous tier first": (
        server(tiers=["S3"], s3={"url": "s3://bucket"}),
        "server.tiers.0",
    ),
    "one claim for all nodes": (server(arena={"type": "claim"}), "server.arena.type"),
    "Posix without a claim": (server(tiers=["Cache", "Posix"]), "server.posix.claim"),
    "S3 without a bucket": (server(tiers=["Cache", "S3"]), "server.s3.url"),
    "S3 by http": (
        server(tiers=["Cache", "S3"], s3={"url": "s3://bucket", "endpoint": "http://minio"}),
        "server.s3.endpoint",
    ),
    "Peer without etcd": (
        server(tiers=["Cache", "Peer"], peer={"tokenSecret": "t"}),
        "server.peer.etcd",
    ),
    "Peer without a token": (
        server(tiers=["Cache", "Peer"], peer={**PEER, "tokenSecret": ""}),
        "server.peer.tokenSecret",
    ),
    "MACs for this node's own blocks": (server(macKeySecret="macs"), "server.tiers"),
    "a long socket path": (server(socketDirectory="/run/" + "x" * 100), "server.socketDirectory"),
    "a relative path": (server(socketDirectory="run"), "server.socketDirectory"),
    "a size with a unit": (server(cacheGiB="16GiB"), "server.cacheGiB"),
    "an option of another value": (
        server(options={"cache": {"capacity": "1GiB"}}),
        "server.options.cache",
    ),
    "a second pipeline": (server(options={"pipeline": "Dax"}), "server.options"),
    "a misspelt value": (server(cacheGib=16), "server"),
    "admission of an attached engine": (
        engine(connector={"admission": "all"}),
        "engine.connector",
    ),
    "tiers of an attached engine": (
        engine(connector={"nvme": {"path": "/x"}}),
        "engine.connector",
    ),
    "two owners of one arena": (
        {"engine": {**OWN, "replicas": 2, "arena": {"type": "claim", "claim": "a"}}},
        "engine.replicas",
    ),
    "an arena without its claim": (
        {"engine": {**OWN, "arena": {"type": "claim"}}},
        "engine.arena.claim",
    ),
    "a second connector": (engine(args=["--kv-transfer-config={}"]), "engine.args.0"),
}


def merged(values: Values, base: Values = VALUES) -> Values:
    """The chart's values with others in their place, as Helm merges them."""
    found = copy.deepcopy(base)
    for name, value in values.items():
        if value is None:
            found.pop(name, None)
        elif isinstance(value, dict) and isinstance(found.get(name), dict):
            found[name] = merged(value, found[name])
        else:
            found[name] = value
    return found


def offences(values: Values) -> dict[str, str]:
    """What the schema refuses, by place."""
    errors = VALIDATOR.iter_errors(merged(values))
    return {".".join(map(str, one.absolute_path)): one.message for one in errors}


@pytest.mark.unit
def test_the_schema_is_one() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)


@pytest.mark.unit
@pytest.mark.parametrize("name", GOOD)
def test_values_that_work_are_accepted(name: str) -> None:
    assert offences(GOOD[name]) == {}


@pytest.mark.unit
@pytest.mark.parametrize("name", BAD)
def test_values_that_cannot_work_are_refused(name: str) -> None:
    values, place = BAD[name]
    assert place in offences(values)


@pytest.mark.unit
def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == dist.version()
    assert VALUES["engine"]["image"].endswith(f":{dist.version()}")


# ---- rendered ---------------------------------------------------------------------------------


def render(helm: str, values: Values, folder: Path) -> subprocess.CompletedProcess[str]:
    """Renders the chart."""
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    command = [helm, "template", "test", CHART, "--kube-version", manifests.KUBE, "--values", file]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def documents(text: str) -> dict[str, Values]:
    """The manifests of a text, by kind."""
    found = [one for one in yaml.safe_load_all(text) if one]
    kinds = {one["kind"]: one for one in found}
    assert len(kinds) == len(found)
    return kinds


def rendered(helm: str, name: str, folder: Path) -> dict[str, Values]:
    run = render(helm, GOOD[name], folder)
    assert run.returncode == 0, run.stderr
    return documents(run.stdout)


@pytest.mark.parametrize("name", BAD)
def test_helm_refuses_before_it_renders(helm: str, name: str, tmp_path: Path) -> None:
    run = render(helm, BAD[name][0], tmp_path)
    assert run.returncode != 0
    assert "values don't meet the specifications of the schema" in run.stderr
    assert run.stdout == ""


def test_helm_finds_nothing_wrong(helm: str) -> None:
    run = subprocess.run([helm, "lint", "--strict", CHART], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("name", GOOD)
def test_the_server_gets_options_that_it_has(helm: str, name: str, tmp_path: Path) -> None:
    kinds = rendered(helm, name, tmp_path)
    if "ConfigMap" not in kinds:
        assert name == "own"
        return
    settings = yaml.safe_load(kinds["ConfigMap"]["data"]["kvdepot.yaml"])
    pod = kinds["DaemonSet"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    for argument in container["args"]:
        if argument.startswith("--option="):
            section, _, rest = argument.removeprefix("--option=").partition(".")
            option, _, value = rest.partition("=")
            value = value.replace("$(NODE_NAME)", "node").replace("$(POD_IP)", "10.0.0.1")
            settings[section][option] = value
    page = (ROOT / "docs/cli.md").read_text().partition("## `kvdepot serve`")[2]
    assert all(f"{one.partition('=')[0]} <" in page for one in container["args"])
    # A file that only the pod has.
    if "peer" in settings:
        token = tmp_path / "token"
        token.write_text("secret")
        token.chmod(0o600)
        settings["peer"]["token_file"] = str(token)
    kvdepot.check(settings.pop("pipeline"), settings, options_only=True)


@pytest.mark.parametrize("name", ["attached", "own", "own, claim"])
def test_the_engine_gets_settings_that_it_has(helm: str, name: str, tmp_path: Path) -> None:
    pod = rendered(helm, name, tmp_path)["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (argument,) = (one for one in container["args"] if one.startswith("--kv-transfer-config="))
    connector = json.loads(argument.partition("=")[2])
    assert connector["kv_connector"] == "KvdepotConnector"
    settings = vllm_settings.read(connector["kv_connector_extra_config"])
    del settings
    is_attached = name == "attached"
    pipeline = connector["kv_connector_extra_config"]["pipeline"]
    assert pipeline == ("unix:/run/kvdepot/kvdepot.sock" if is_attached else "Cache|Nvme")
    strategy = rendered(helm, name, tmp_path)["Deployment"]["spec"]["strategy"]["type"]
    assert strategy == ("Recreate" if name == "own, claim" else "RollingUpdate")


def test_server_and_engine_have_one_user_and_one_socket(helm: str, tmp_path: Path) -> None:
    for name, uid in (("attached", 65532), ("the platform's user", None)):
        kinds = rendered(helm, name, tmp_path)
        pods = [kinds[kind]["spec"]["template"]["spec"] for kind in ("DaemonSet", "Deployment")]
        for pod in pods:
            assert pod["securityContext"].get("runAsUser") == uid
            assert pod["securityContext"]["runAsNonRoot"] is True
        sockets = [one for pod in pods for one in pod["volumes"] if one["name"] == "socket"]
        paths = [one["hostPath"]["path"] for one in sockets]
        assert paths == ["/run/kvdepot"] * 2
        # As root only the container that prepares the directories of the node.
        inits = pods[0].get("initContainers", [])
        assert [one["name"] for one in inits] == (["directories"] if uid else [])


def gib(text: str) -> int:
    """A number of GiB."""
    assert text.endswith("Gi")
    return int(text.removesuffix("Gi"))


def test_memory_limits_cover_cache(helm: str, tmp_path: Path) -> None:
    for name, memory in (("as it is", 16 + 2), ("Peer", 16 + 16 + 2), ("Nvme alone, emptyDir", 2)):
        pod = rendered(helm, name, tmp_path)["DaemonSet"]["spec"]["template"]["spec"]
        limits = pod["containers"][0]["resources"]["limits"]
        assert gib(limits["memory"]) == memory, name
    # An engine may be the first that writes a page of the server's Cache.
    for name in ("attached", "own"):
        pod = rendered(helm, name, tmp_path)["Deployment"]["spec"]["template"]["spec"]
        resources = pod["containers"][0]["resources"]
        assert gib(resources["limits"]["memory"]) == 64 + 16
        assert gib(resources["requests"]["memory"]) == (64 if name == "attached" else 80)


def test_the_kernel_that_cannot_tell_deaths_gets_the_node_s_processes(
    helm: str, tmp_path: Path
) -> None:
    pods = [rendered(helm, name, tmp_path)["DaemonSet"]["spec"]["template"]["spec"]
            for name in ("old kernel", "as it is")]  # fmt: skip
    assert [pod.get("hostPID") for pod in pods] == [True, None]


def test_probes_and_grace_fit_the_server(helm: str, tmp_path: Path) -> None:
    pod = rendered(helm, "as it is", tmp_path)["DaemonSet"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    probes = [container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")]
    socket = container["args"][1].removeprefix("--socket=")
    for probe in probes:
        assert probe["exec"]["command"] == ["kvdepot", "stat", f"unix:{socket}"]
        # A client's own time-out is 10 s.
        assert probe["timeoutSeconds"] > 10
    # More than close_timeout.
    assert pod["terminationGracePeriodSeconds"] > 60


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The program that decodes manifests into the types of k8s.io/api."""
    go = shutil.which("go")
    if go is None:
        pytest.skip("there is no Go, in which the types of Kubernetes are written")
    program = tmp_path_factory.mktemp("strict") / "strict"
    built = subprocess.run(
        [go, "build", "-o", program, "."], cwd=Path(__file__).parent / "strict",
        capture_output=True, text=True, env=os.environ | {"GOFLAGS": "-mod=readonly"}, check=False,
    )  # fmt: skip
    if "dial tcp" in built.stderr or "no such host" in built.stderr:
        pytest.skip("the modules of k8s.io cannot be downloaded")
    assert built.returncode == 0, built.stderr
    return str(program)


def decode(strict: str, text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([strict], input=text, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", GOOD)
def test_clusters_know_every_field(strict: str, helm: str, name: str, tmp_path: Path) -> None:
    run = render(helm, GOOD[name], tmp_path)
    found = decode(strict, run.stdout)
    assert found.returncode == 0, found.stderr
    assert len(found.stdout.splitlines()) == len(documents(run.stdout))


def test_fields_that_clusters_do_not_know_are_found(strict: str) -> None:
    text = (ROOT / "deploy/kubernetes/server.yaml").read_text()
    assert decode(strict, text).returncode == 0
    for old, new in (
        ("hostPath:", "hostpath:"),
        ("terminationGracePeriodSeconds: 90", "terminationGracePeriodSeconds: long"),
        ("      enableServiceLinks: false", "      enableServiceLinks: false\n" * 2),
        ("kind: DaemonSet", "kind: DemonSet"),
    ):
        assert old in text
        found = decode(strict, text.replace(old, new, 1))
        assert found.returncode == 1, new


@pytest.mark.parametrize("file", manifests.FILES)
def test_the_manifests_are_the_chart_s(helm: str, file: str) -> None:
    text = (manifests.FOLDER / file).read_text()
    assert text == manifests.manifest(helm, file), "make manifests"


@pytest.mark.parametrize("file", manifests.FILES)
def test_clusters_know_every_field_of_the_manifests(strict: str, file: str) -> None:
    found = decode(strict, (manifests.FOLDER / file).read_text())
    assert found.returncode == 0, found.stderr
