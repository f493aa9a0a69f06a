"""One server with the default pipeline: what users see."""

from __future__ import annotations

import http.client
import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_fleet import DEFAULT, Fleet
from engine_harness import BLOCK, Engine, assert_same, prompts

SERVERS = [DEFAULT]


@pytest.fixture(scope="module")
def engine(fleet: Fleet) -> Engine:
    # It goes on: test_sigkill.py kills it.
    return fleet.take(DEFAULT)


def test_a_second_request_is_served_and_gives_the_same_output(engine: Engine) -> None:
    (prompt,) = prompts(1, 1000, seed=10)
    first = engine.ask(prompt)
    engine.settle()
    before = engine.external_hits()
    second = engine.ask(prompt)
    assert first.cached_tokens == 0
    assert second.cached_tokens == 1000 // BLOCK * BLOCK
    assert engine.external_hits() - before == second.cached_tokens
    assert_same(second, first)


def test_a_prompt_that_continues_another_is_served_its_beginning(engine: Engine) -> None:
    (prompt,) = prompts(1, 900, seed=11)
    engine.ask(prompt[:600])
    engine.settle()
    longer = engine.ask(prompt)
    assert longer.cached_tokens == 600 // BLOCK * BLOCK
    engine.settle()
    assert_same(engine.ask(prompt), longer)


def test_generated_tokens_are_stored_too(engine: Engine) -> None:
    (prompt,) = prompts(1, 3 * BLOCK - 30, seed=12)
    answer = engine.ask(prompt, output_tokens=60)
    engine.settle()
    generated = [int(token.removeprefix("token_id:")) for token in answer.tokens]
    follow_up = engine.ask([*prompt, *generated, 5, 6, 7])
    assert follow_up.cached_tokens == 3 * BLOCK


def test_requests_at_once_with_a_common_beginning_stay_right(engine: Engine) -> None:
    (common,) = prompts(1, 2 * BLOCK + 10, seed=13)
    tails = prompts(6, BLOCK, seed=14)
    wanted = [engine.ask(common + tail) for tail in tails]
    engine.reset(external=True)
    with ThreadPoolExecutor(6) as threads:
        for _ in range(2):
            answers = list(threads.map(lambda tail: engine.ask(common + tail), tails))
            for answer, want in zip(answers, wanted, strict=True):
                assert_same(answer, want)
    engine.settle()
    assert engine.failed_loads() == 0


def test_a_request_that_is_given_up_leaves_the_server_whole(engine: Engine) -> None:
    for prompt in prompts(3, 1500, seed=15):
        connection = http.client.HTTPConnection("127.0.0.1", engine.server.port)
        body = {"model": "demo", "prompt": prompt, "max_tokens": 64, "stream": True}
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        connection.close()
    (prompt,) = prompts(1, 700, seed=16)
    first = engine.ask(prompt)
    engine.settle()
    assert_same(engine.ask(prompt), first)


def test_a_reset_forgets_the_blocks(engine: Engine) -> None:
    (prompt,) = prompts(1, 700, seed=17)
    first = engine.ask(prompt)
    engine.settle()
    assert engine.ask(prompt).cached_tokens > 0
    engine.reset(external=True)
    again = engine.ask(prompt)
    assert again.cached_tokens == 0
    assert_same(again, first)
    engine.settle()
    assert engine.ask(prompt).cached_tokens > 0


def test_blocks_pushed_out_of_the_near_tier_come_from_the_far_one(engine: Engine) -> None:
    # 10 prompts of 4 blocks of 2 MiB do not fit into 64 MiB, but into 512 MiB.
    many = prompts(10, 4 * BLOCK + 20, seed=18)
    first = [engine.ask(prompt) for prompt in many]
    engine.settle()
    far = engine.metric("kvdepot_moved_blocks_total", op="load", tier="Dax")
    for prompt, want in zip(many, first, strict=True):
        answer = engine.ask(prompt)
        assert answer.cached_tokens == 4 * BLOCK
        assert_same(answer, want)
    assert engine.metric("kvdepot_moved_blocks_total", op="load", tier="Dax") > far


def test_the_log_and_the_metrics_tell_what_happened(engine: Engine) -> None:
    (prompt,) = prompts(1, 700, seed=19)
    engine.ask(prompt)
    engine.settle()
    engine.ask(prompt)
    log = engine.log()
    assert re.search(r"request \S+: 6 blocks, 0 hit on the device, 5 hit external \(Cache 5\)", log)
    assert "kv_load_failure_policy is 'recompute'" in log
    assert engine.metric("kvdepot_capacity_bytes", tier="Cache") == 64 << 20
    # The record table takes a little of the arena, for blocks of 4 KiB: 1/32.
    assert 490 << 20 < engine.metric("kvdepot_capacity_bytes", tier="Dax") <= 512 << 20
    assert engine.metric("kvdepot_live_blocks", tier="Dax") >= 5
    assert engine.metric("kvdepot_hit_blocks_total", tier="Cache") >= 5
    assert engine.metric("kvdepot_moved_bytes_total", op="store") > 0
    assert engine.metric("kvdepot_request_path_seconds_total", source="worker") > 0
    assert engine.metric("vllm:prompt_tokens_cached_by_source_total", source="host") > 0
