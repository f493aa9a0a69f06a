"""vLLM on one host hits what vLLM on another host stored: two servers in network namespaces."""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from engine_fleet import Fleet, Plan, make_models, model_directory
from engine_harness import assert_same
from hosts import Host, Hosts, why_not
from vllm_demo import measure
from vllm_demo.server import Server

REASON = why_not()
pytestmark = [
    pytest.mark.stress,  # tests/python/test_peer_hosts.py does it without servers.
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]

TOKENS = 2000
PORT = 7400
CLONE_NEWNET = 0x40000000


@contextmanager
def inside(host: Host) -> Iterator[None]:
    """This thread is on that host: its sockets are."""
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(path: str) -> None:
        file = os.open(path, os.O_RDONLY)
        try:
            if libc.setns(file, CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"setns {path}")
        finally:
            os.close(file)

    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    enter(f"/run/netns/{host.name}")
    try:
        yield
    finally:
        assert libc.setns(own, CLONE_NEWNET) == 0
        os.close(own)


def start(host: Host, hosts: list[Host], model: Path, work: Path, role: str = "kv_both") -> Server:
    peers = ",".join(f"{one.name} {one.address}:{PORT}" for one in hosts)
    settings = {
        "pipeline": "Cache|Peer",
        "cache": {"capacity": "1GiB"},
        # Both servers compute on the same few cores, and answer late.
        "lookup_wait": "20s",
        # A probe would compute a part of what is found, which tests count.
        "probe_every": 0,
        "peer": {
            "name": host.name,
            "token": "shared",
            "hosts": peers,
            "capacity": "1GiB",
            # Another host is waited for about half as long.
            "lookup_timeout": "20s",
        },
    }
    transfer = {
        "kv_connector": "KvdepotConnector",
        "kv_connector_module_path": "kvdepot.vllm",
        "kv_role": role,
        "kv_connector_extra_config": settings,
    }
    python = work / f"python-{host.name}"
    python.write_text(f'#!/bin/sh\nexec ip netns exec {host.name} {sys.executable} "$@"\n')
    python.chmod(0o755)
    arguments = ["--no-enable-prefix-caching", "--kv-transfer-config", json.dumps(transfer)]
    log = work / f"{host.name}.log"
    return Server(
        host.name,
        model,
        log=log,
        arguments=arguments,
        python=str(python),
        # Where a step takes over a second, vLLM's processes lose each other's wake-ups now and then
        # (vllm-project/vllm#45224), and look again after five seconds, or after this.
        environment={"VLLM_RINGBUFFER_WARNING_INTERVAL": "1"},
    )


def test_what_one_host_has_computed_another_does_not_compute_again(
    fleet: Fleet, tmp_path: Path
) -> None:
    make_models([Plan("peers", lambda _: {}).model])
    model = model_directory("qwen3")
    tokens = int(os.environ.get("KVDEPOT_PEER_TOKENS", str(TOKENS)))
    prompts = measure.prompts(3, tokens, seed=tokens)
    with Hosts(2) as hosts:
        servers = [start(host, hosts, model, tmp_path) for host in hosts]
        try:
            for host, server in zip(hosts, servers, strict=True):
                with inside(host):
                    server.wait_ready()
                    measure.ask(server, measure.prompts(1, 200, seed=1)[0])
            with inside(hosts[0]):
                computed = [measure.ask(servers[0], prompt) for prompt in prompts]
                measure.wait_until_written(servers[0])
            with inside(hosts[1]):
                far = [measure.ask(servers[1], prompt) for prompt in prompts]
                near = [measure.ask(servers[1], prompt) for prompt in prompts]
        finally:
            for server in servers:
                server.stop()
    for full, one, again in zip(computed, far, near, strict=True):
        assert one.cached_tokens >= tokens // 128 * 128 - 128, (one, again)
        assert_same(one, full)
        assert_same(again, full)
    times = {
        name: round(statistics.median(answer.ttft_ms for answer in answers), 1)
        for name, answers in (("computed", computed), ("far", far), ("near", near))
    }
    print(json.dumps({"tokens": tokens, **times}))


def complete(server: Server, prompt: list[int], tokens: int, params: dict[str, object]) -> dict:
    """As a proxy of disaggregated prefill asks."""
    body = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_tokens_as_token_ids": True,
        "logprobs": 1,
        "kv_transfer_params": params,
    }
    with server.post("/v1/completions", body) as answer:
        return json.loads(answer.read())


def test_one_host_computes_prompts_and_another_goes_on_with_them(
    fleet: Fleet, tmp_path: Path
) -> None:
    make_models([Plan("peers", lambda _: {}).model])
    model = model_directory("qwen3")
    prompts = measure.prompts(3, TOKENS, seed=2 * TOKENS)
    with Hosts(2) as hosts:
        roles = ("kv_producer", "kv_consumer")
        servers = [
            start(host, hosts, model, tmp_path, role)
            for host, role in zip(hosts, roles, strict=True)
        ]
        producer, consumer = servers
        try:
            for host, server in zip(hosts, servers, strict=True):
                with inside(host):
                    server.wait_ready()
            for prompt in prompts:
                with inside(hosts[0]):
                    first = complete(producer, prompt, 1, {"do_remote_decode": True})
                params = first["kv_transfer_params"]
                assert params["do_remote_prefill"] is True
                # At once: what is on its way is waited for.
                with inside(hosts[1]):
                    second = complete(consumer, prompt, 8, params)
                tokens = [one["choices"][0]["logprobs"]["tokens"] for one in (first, second)]
                assert tokens[1][:1] == tokens[0]
            # Of such a request vLLM says as cached what the producer had: the log knows.
            hits = f"{TOKENS // 128} hit external (Peer {TOKENS // 128})"
            assert consumer.log.read_text().count(hits) == len(prompts)
            # Who only produces computes again.
            with inside(hosts[0]):
                again = complete(producer, prompts[0], 1, {})
            assert not (again["usage"]["prompt_tokens_details"] or {}).get("cached_tokens")
        finally:
            for server in servers:
                server.stop()
