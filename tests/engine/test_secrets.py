"""Secrets that an engine and its depot are given are in no name, no log line and no error."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import kvdepot
import pytest

pytest.importorskip("vllm")

from engine_double import OURS, EngineDouble, full
from engine_harness import ROOT
from kvdepot.vllm import options as vllm_options
from kvdepot.vllm import settings as vllm_settings
from test_scheduling import prompt

pytestmark = pytest.mark.integration

# Every secret of these tests has it.
MARK = "hunter2"
SALT, TOKEN, URL = f"{MARK}-salt", f"{MARK}-token", f"https://{MARK}-user:{MARK}@host/path"
MAC_KEY = MARK.encode().hex().ljust(64, "0")
ENVIRONMENT = {
    name: f"{MARK}-{name}"
    for name in (
        "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN",
        "OPENAI_API_KEY", "S3_ACCESS_KEY_ID", "S3_SECRET_ACCESS_KEY", "VLLM_API_KEY",
        "VLLM_OF_A_LATER_VERSION_PASSWORD",
    )
}  # fmt: skip
# It counts, as every variable that nobody has listed.
ENVIRONMENT["VLLM_OF_A_LATER_VERSION"] = URL
ADDITIONAL = {
    "headers": {"Authorization": f"Bearer {MARK}"},
    "passphrase": MARK,
    "proxy": {"url": URL, "urls": [f"redis://{MARK}@host"]},
    "seen": "by all",
}


def shown(text: str) -> list[str]:
    """The lines of the text that have a secret."""
    marks = (MARK, MARK.encode().hex())
    return [line for line in text.splitlines() if any(mark in line.lower() for mark in marks)]


@pytest.fixture
def everything_logged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What any logger of this process gets, at whatever level."""
    lines: list[str] = []
    formatter = logging.Formatter("%(name)s %(message)s")

    def is_enabled(self: logging.Logger, level: int) -> bool:
        # Torch looks at its own sources, line by line.
        return level > logging.DEBUG or not self.name.startswith("torch")

    def keep(self: logging.Logger, record: logging.LogRecord) -> None:
        lines.append(f"{formatter.format(record)} {record.__dict__}")

    monkeypatch.setattr(logging.Logger, "isEnabledFor", is_enabled)
    monkeypatch.setattr(logging.Logger, "handle", keep)
    return lines


def pipeline_of(name: str, directory: Path) -> dict[str, Any]:
    """Settings of a pipeline with secrets of its own."""
    cache = {"pipeline": f"Cache|{name}", "cache": {"capacity": "4MiB"}}
    if name == "Posix":
        keys = directory / "keys"
        keys.touch(0o600)
        keys.write_text(f"{SALT} {MAC_KEY}\n")
        posix = {"path": str(directory / "posix"), "capacity": "64MiB"}
        return cache | {"posix": posix, "mac_key_file": str(keys)}
    if name == "Peer":
        hosts = "one 127.0.0.1:0"
        return cache | {"peer": {"name": "one", "capacity": "4MiB", "hosts": hosts, "token": TOKEN}}
    return {"pipeline": "Dax", "dax": {"path": str(directory / "arena"), "capacity": "16MiB"}}


@pytest.mark.parametrize("pipeline", ["Dax", "Posix", "Peer"])
def test_an_engine_that_serves_shows_no_secret(
    tmp_path: Path,
    pipeline: str,
    everything_logged: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(ROOT / "build" / "vllm-cache"))
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    settings = {"salt": SALT, "lookup_wait": "10m"} | pipeline_of(pipeline, tmp_path)
    transfer = OURS | {"kv_connector_extra_config": settings}
    secrets = {"hf_token": f"hf_{MARK}", "additional_config": ADDITIONAL}
    engine = EngineDouble(tmp_path / "engine", [full()], transfer, arguments=secrets)
    try:
        asked = prompt(1, 100)
        engine.ask(asked)
        # With every line that a warning about other weights leads to.
        engine.reload(1)
        engine.reset(external=True)
        engine.ask(asked)
        engine.reset(external=False)
        assert engine.ask(asked)[0] > 0
        depot = engine.connector.manager.depot.raw
        texts = {
            "geometry": repr(engine.worker.get_handshake_metadata()),
            "depot": f"{depot!r} {depot.description} {depot.stats()}",
            "metrics": depot.metrics_text(),
            "namespaces": repr([repr(one) for one in depot.namespaces()]),
            "statistics": repr(engine.connector.manager.get_stats()),
        }
    finally:
        engine.close()
    texts["logs"] = "\n".join(everything_logged)
    for file in tmp_path.rglob("*"):
        if file.is_file() and file.name != "keys" and file.stat().st_size:
            texts[str(file)] = file.read_bytes().decode("latin-1")
    if pipeline == "Dax":
        command = [sys.executable, "-m", "kvdepot._cli", "ls", str(tmp_path / "arena"), "--json"]
        listed = subprocess.run(command, capture_output=True, text=True, check=True)
        texts["ls"] = listed.stdout + listed.stderr
        assert "https://host/path" in texts["ls"], "descriptions have what counts"
    assert "VLLM_OF_A_LATER_VERSION" in texts["geometry"]
    assert "namespace" in texts["logs"]
    assert {where: found for where, text in texts.items() if (found := shown(text))} == {}


def test_what_counts_beside_a_secret_still_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvdepot.engine import options

    found = json.loads(options.text_of({"additional_config": ADDITIONAL}))
    rest = {"headers": {}, "proxy": {"url": "https://host/path", "urls": ["redis://host"]}}
    assert found == {"additional_config": rest | {"seen": "by all"}}
    # An address that only looks like one with a user.
    for text in ("https://host/path@1", "s3://bucket?user@host", "user:word@host", "a@b://c"):
        assert options.canonical(text) == text
    assert dict(vllm_options.variables(ENVIRONMENT)) == {"VLLM_OF_A_LATER_VERSION": URL}


WRONG: dict[str, dict[str, Any]] = {
    "a salt that is a list": {"salt": [SALT]},
    "a salt that is a mapping": {"salt": {SALT: SALT}},
    "an option beside a salt": {"salt": SALT, "slat": SALT},
    "an option beside a token": {"pipeline": "Peer", "peer": {"token": TOKEN, "tokens": TOKEN}},
    "a token of another pipeline": {"pipeline": "Cache", "peer": {"token": TOKEN}},
    "a token of a server": {"pipeline": "unix:/s", "peer": {"token": TOKEN}},
    "a token and a file": {
        "pipeline": "Peer",
        "peer": {"name": "a", "capacity": "1MiB", "token": TOKEN, "token_file": "/none"},
    },
    "keys of S3": {
        "pipeline": "S3",
        "s3": {"url": "s3://bucket/kv", "access_key_id": MARK, "secret_access_key": MARK},
    },
    "keys of S3 outside of its section": {"pipeline": "S3", "aws_secret_access_key": MARK},
    "keys of S3 in place of their file": {
        "pipeline": "S3",
        "s3": {"url": "s3://bucket/kv", "credentials": {"aws_secret_access_key": MARK}},
    },
    "keys of S3 in its address": {
        "pipeline": "S3",
        "s3": {"url": f"s3://{MARK}:{MARK}/{MARK}@bucket/kv", "capacity": "1GiB"},
    },
    "a token that is a list": {"pipeline": "Peer", "peer": {"token": [TOKEN]}},
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("place", ["here", "in a file"])
def test_a_setting_that_is_refused_shows_no_secret(
    tmp_path: Path, everything_logged: list[str], wrong: str, place: str
) -> None:
    settings = WRONG[wrong]
    if place == "in a file":
        # JSON is YAML.
        (tmp_path / "depot.yaml").write_text(json.dumps(settings))
        settings = {"config_file": str(tmp_path / "depot.yaml")}
    with pytest.raises(kvdepot.ConfigError) as refused:
        vllm_settings.read(settings)
    assert shown("\n".join(traceback.format_exception(refused.value))) == []
    assert shown("\n".join(everything_logged)) == []


@pytest.mark.parametrize("wrong", ["salt", "token"])
def test_a_file_that_cannot_be_read_as_yaml_shows_no_secret(tmp_path: Path, wrong: str) -> None:
    file = tmp_path / "depot.yaml"
    for text in (f"{wrong}: [{MARK}", f"{wrong} {MARK}", f'{wrong}: "{MARK}', f"\t{wrong}: {MARK}"):
        file.write_text(text)
        with pytest.raises(kvdepot.ConfigError) as refused:
            vllm_settings.read({"config_file": str(file)})
        assert shown("\n".join(traceback.format_exception(refused.value))) == []


# Opens depots with the settings of standard input, each (pipeline, options, salt), and prints what
# it can find out about them.
OPEN = """
import json, sys, traceback
import kvdepot
for pipeline, options, salt in json.load(sys.stdin):
    for call in (kvdepot.check, kvdepot.open):
        try:
            depot = call(pipeline, options)
            if depot is not None:
                print(repr(depot), depot.description, depot.stats())
                namespace = depot.namespace(model="m", dtype="f", block_tokens=1, salt=salt)
                print(repr(namespace), namespace.contains([bytes(32)]))
                depot.close()
        except kvdepot.Error:
            traceback.print_exc()
print("all tried")
"""


def files_with_secrets(directory: Path) -> dict[str, str]:
    """Paths of files that are not what they should be, by what they should be."""
    texts = {
        "credentials": f"[default]\naws_access_key_id = {MARK}\naws_secret_access_key {MARK}\n",
        "pair": f"[default]\naws_access_key_id = {MARK}\naws_secret_access_key = {MARK}\n",
        "token": f"{MARK}\n{MARK}\n",
        "empty": "\n",
        "mac": f"{SALT} {MAC_KEY}0\n",
        "others": f"other-{MARK} {MAC_KEY}\n",
        "pem": f"-----BEGIN PRIVATE KEY-----\n{MARK}!\n-----END PRIVATE KEY-----\n",
        "text": f"{MARK}\n",
    }
    for name, text in texts.items():
        (directory / name).touch(0o600)
        (directory / name).write_text(text)
    return {name: str(directory / name) for name in texts}


def test_a_depot_that_cannot_be_opened_shows_no_secret(tmp_path: Path) -> None:
    """With every line that the library logs."""
    files = files_with_secrets(tmp_path)
    bucket = {"url": "s3://bucket/kv", "capacity": "1GiB", "allow_http": True, "timeout": "1s"}
    bucket |= {"endpoint": "http://127.0.0.1:1", "lookup_timeout": "1s"}
    peer = {"name": "a", "capacity": "1MiB", "hosts": "a 127.0.0.1:0"}
    posix = {"path": str(tmp_path / "posix"), "capacity": "16MiB"}
    tls = {"tls_certificate": files["pem"], "tls_key": files["pem"], "tls_ca": files["pem"]}
    tries = [
        # Those of the environment, and of a file.
        ("S3", {"s3": bucket}),
        ("S3", {"s3": bucket | {"credentials": files["credentials"]}}),
        ("S3", {"s3": bucket | {"credentials": files["pair"]}}),
        ("S3", {"s3": bucket | {"secret_access_key": MARK}}),
        ("S3", {"s3": bucket | {"endpoint": URL}}),
        ("S3", {"s3": bucket | {"endpoint": f"http://127.0.0.1:1?X-Amz-Signature={MARK}"}}),
        ("Peer", {"peer": {"name": "a", "capacity": "1MiB", "etcd": URL}}),
        ("Peer", {"peer": peer | {"token": TOKEN}}),
        ("Peer", {"peer": peer | {"token": TOKEN, "token_file": files["token"]}}),
        ("Peer", {"peer": peer | {"token_file": files["token"]}}),
        ("Peer", {"peer": peer | {"token_file": files["empty"]}}),
        ("Peer", {"peer": peer | tls}),
        ("Peer", {"peer": peer | tls | {"tls_ca": files["text"]}}),
        ("Peer", {"peer": peer | {"tls_key": files["pem"]}}),
        ("Posix", {"posix": posix, "mac_key_file": files["mac"]}),
        # It has no key for the salt.
        ("Posix", {"posix": posix, "mac_key_file": files["others"]}),
    ]
    found = subprocess.run(
        [sys.executable, "-c", OPEN],
        input=json.dumps([(*one, SALT) for one in tries]),
        env={**os.environ, **ENVIRONMENT, "KVDEPOT_LOG": "trace"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert "all tried" in found.stdout, found.stderr
    # The library logs, and errors name what is wrong.
    for words in ("DEBUG", "s3.credentials", "mac_key_file", "tls_ca", "Namespace"):
        assert words in found.stdout + found.stderr, words
    assert shown(found.stdout + found.stderr) == []
