"""States in pieces: bit-identical in fresh processes, and faults of the medium are misses."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: see `make llama`")

import kvdepot
from kvdepot.llama_cpp import States
from llama_child import logits_after, open_depot, tokens_of

CHILD = Path(__file__).parent / "llama_child.py"

# Kinds of models, and settings under which their states differ.
CASES = [
    pytest.param("llama", {"flash_attn": True}, id="rows"),
    pytest.param("llama", {}, id="transposed"),
    pytest.param("llama", {"flash_attn": True, "type_k": 8, "type_v": 8}, id="quantised"),
    pytest.param("gemma", {"swa_full": True}, id="window-full"),
    pytest.param("gemma", {"swa_full": False, "flash_attn": True}, id="window"),
    pytest.param("mamba", {}, id="recurrent"),
    pytest.param("jamba", {}, id="hybrid"),
]


def child(do: str, model: Path, depot: Path, **order: Any) -> dict[str, Any]:
    order |= {"do": do, "model": str(model), "depot": str(depot)}
    order.setdefault("file", str(depot.parent / "whole.state"))
    command = [sys.executable, str(CHILD), json.dumps(order)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    answer: dict[str, Any] = json.loads(ended.stdout)
    return answer


@pytest.mark.parametrize(("kind", "settings"), CASES)
def test_whole_pieced_and_computed_states_have_the_same_logits_to_the_bit(
    kind: str, settings: dict[str, Any], model_files: Callable[..., Path], tmp_path: Path
) -> None:
    model, depot = model_files(kind), tmp_path / "depot"
    saved = child("save", model, depot, settings=settings)
    assert (saved["saved"]["cached_tokens"], saved["saved"]["cache_write_tokens"]) == (0, 700)
    restored = child("restore", model, depot, settings=settings)
    assert (restored["cached"], restored["same"]) == (700, True)
    whole = child("whole", model, depot, settings=settings, file=str(tmp_path / "whole.state"))
    computed = child("compute", model, depot, settings=settings)
    answers = [saved, restored, whole, computed]
    assert len({answer["logits"] for answer in answers}) == 1
    assert child("compute", model, depot, settings=settings, seed=5)["logits"] != whole["logits"]


def test_only_what_is_new_is_written(make_llama: Callable[..., Any], tmp_path: Path) -> None:
    llama = make_llama(flash_attn=True)
    with open_depot(str(tmp_path / "depot")) as depot:
        states = States(llama, depot, piece_tokens=128)
        llama.eval(tokens_of(1024))
        first = states.save()
        row = first["bytes_written"] / 1024
        assert states.save() == {"cached_tokens": 1024, "cache_write_tokens": 0, "bytes_written": 0}
        llama.eval(tokens_of(1536)[1024:])
        new = states.snapshot()
        assert new is not None
        # With a cell of 12 bytes a token, and the heads of the tables.
        assert 0 <= new.nbytes - 512 * (states.sequence.layout.token_bytes + 12) < 512
        more = states.save()
        assert (more["cached_tokens"], more["cache_write_tokens"]) == (1024, 512)
        # With a manifest of five bytes a token at most.
        assert more["bytes_written"] < 512 * row * 1.1 + 5 * 1536
        # Another conversation that begins so.
        llama.n_tokens = 700
        llama.eval([9] * 100)
        other = states.save()
        assert (other["cached_tokens"], other["cache_write_tokens"]) == (640, 160)


def test_conversations_share_what_they_begin_with(
    make_llama: Callable[..., Any], tmp_path: Path
) -> None:
    llama = make_llama()
    tokens = tokens_of(600)
    with open_depot(str(tmp_path / "depot")) as depot:
        states = States(llama, depot, piece_tokens=128)
        llama.eval(tokens)
        states.save()
        logits = logits_after(llama)
        llama.reset()
        assert states.restore([*tokens[:520], 7, 7, 7]) == 512
        assert states.sequence.tokens == tokens[:512]
        llama.eval(tokens[512:])
        # The end of a prompt that was computed in other batches may have other last bits.
        assert states.restore([*tokens, 7]) == 600
        assert logits_after(llama) == logits
        assert states.restore([2, *tokens]) == 0
        assert llama.n_tokens == 0


@pytest.mark.parametrize("kind", ["gemma", "mamba", "jamba"])
def test_states_that_cannot_be_cut_go_on_from_their_end_alone(
    kind: str, make_llama: Callable[..., Any], tmp_path: Path
) -> None:
    llama = make_llama(kind)
    tokens = tokens_of(300)
    with open_depot(str(tmp_path / "depot")) as depot:
        states = States(llama, depot, piece_tokens=32)
        for end in (100, 300):
            llama.eval(tokens[llama.n_tokens : end])
            assert states.save()["cached_tokens"] == (96 if end == 300 else 0)
        logits = logits_after(llama)
        # All of it: the last token has to be computed, and so the state before it is needed.
        assert states.restore(tokens) == 100
        assert states.restore([*tokens[:299], 9, 9]) == 100
        assert states.restore([*tokens, 7]) == 300
        assert logits_after(llama) == logits


def test_the_size_of_the_context_is_no_part_of_the_key_and_numbers_are(
    make_llama: Callable[..., Any], tmp_path: Path
) -> None:
    tokens = tokens_of(200)
    with open_depot(str(tmp_path / "depot")) as depot:
        llama = make_llama()
        llama.eval(tokens)
        States(llama, depot).save()

        def found(seed: int = 1, salt: str | None = None, **settings: Any) -> int:
            other = make_llama(seed=seed, **settings)
            return States(other, depot, salt=salt).restore([*tokens, 7])

        assert found() == 200
        assert found(n_ctx=1024, n_batch=64) == 200
        assert found(n_ctx=100) == 0, "no room for a piece"
        assert found(seed=2) == 0, "other weights of the same shape"
        assert found(rope_freq_base=5000.0) == 0
        assert found(flash_attn=True) == 0, "values lie otherwise"
        assert found(type_k=8) == 0
        assert found(kv_overrides={"llama.attention.layer_norm_rms_epsilon": 1e-3}) == 0
        assert found(salt="steered") == 0


def test_an_adapter_and_its_scale_are_part_of_the_key(
    make_llama: Callable[..., Any], model_files: Callable[..., Path], tmp_path: Path
) -> None:
    tokens = tokens_of(200)
    one, two = str(model_files("lora")), str(model_files("lora", 2))
    with open_depot(str(tmp_path / "depot")) as depot:
        llama = make_llama(lora_path=one)
        llama.eval(tokens)
        States(llama, depot).save()
        logits = logits_after(llama)

        def restored(**settings: Any) -> Any:
            other = make_llama(**settings)
            return States(other, depot).restore([*tokens, 7]) and logits_after(other)

        assert restored(lora_path=one) == logits
        assert restored(lora_path=two) == 0
        assert restored(lora_path=one, lora_scale=0.5) == 0
        assert restored() == 0


def faults(draw: random.Random) -> dict[str, Callable[[Path], None]]:
    """What may happen to a block's file; all inside of its tensors."""

    def change(path: Path, length: int, how: Callable[[bytes], bytes]) -> None:
        size = path.stat().st_size
        with path.open("r+b") as file:
            # In front is the header, and behind it come aligned rows.
            at = draw.randrange(8192, size - length)
            file.seek(at)
            old = file.read(length)
            file.seek(at)
            file.write(how(old))

    def hole(path: Path) -> None:
        data = path.read_bytes()
        with path.open("r+b") as file:
            file.truncate(8192)
            file.seek(8192 + 65536)
            file.write(data[8192 + 65536 :])

    return {
        "a flipped bit": lambda path: change(path, 1, lambda old: bytes([old[0] ^ 4])),
        "a zeroed page": lambda path: change(path, 4096, lambda old: bytes(len(old))),
        "a hole": hole,
        "truncation": lambda path: path.write_bytes(path.read_bytes()[:-8192]),
    }


def _blocks(folder: Path) -> list[tuple[int, Path]]:
    return sorted((p.stat().st_size, p) for p in folder.rglob("*") if p.is_file())


@pytest.mark.parametrize("fault", list(faults(random.Random(0))))
def test_what_does_not_verify_is_not_used(
    fault: str, make_llama: Callable[..., Any], tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    llama = make_llama()
    tokens = tokens_of(1000)
    llama.eval(tokens)
    with open_depot(str(tmp_path / "depot")) as depot:
        states = States(llama, depot)
        states.save()
        logits = logits_after(llama)
    pieces = [path for size, path in _blocks(tmp_path / "depot") if size > 128 * 256]
    assert len(pieces) >= 7
    faults(draw)[fault](draw.choice(pieces))
    with open_depot(str(tmp_path / "depot")) as depot:
        states = States(llama, depot)
        cached = states.restore([*tokens, 7])
        assert 0 <= cached < 1000
        assert cached % 128 == 0
        llama.eval(tokens[cached:])
        states.save()
        # What was lost is there again.
        assert states.restore([*tokens, 7]) == 1000
        llama.reset()
        llama.eval(tokens)
        assert logits_after(llama) == logits


@pytest.mark.parametrize("kind", ["gemma", "mamba", "jamba"])
def test_a_rest_that_does_not_verify_is_not_used(
    kind: str, make_llama: Callable[..., Any], tmp_path: Path, seed: int
) -> None:
    llama = make_llama(kind)
    tokens = tokens_of(300)
    with open_depot(str(tmp_path / "depot")) as depot:
        # Pieces are smaller.
        states = States(llama, depot, piece_tokens=16)
        llama.eval(tokens)
        states.save()
    flip = faults(random.Random(seed))["a flipped bit"]
    flip(_blocks(tmp_path / "depot")[-1][1])
    with open_depot(str(tmp_path / "depot")) as depot:
        states = States(llama, depot, piece_tokens=16)
        assert states.restore([*tokens, 7]) == 0
        llama.eval(tokens)
        states.save()
        assert states.restore([*tokens, 7]) == 300


def test_another_process_finds_what_was_saved_since(
    make_llama: Callable[..., Any], model_files: Callable[..., Path], tmp_path: Path
) -> None:
    llama = make_llama()
    with open_depot(str(tmp_path / "depot")) as depot:
        states = States(llama, depot)
        assert states.restore([*tokens_of(700), 7]) == 0
        saved = child("save", model_files("llama"), tmp_path / "depot")
        assert states.restore([*tokens_of(700), 7]) == 700
        assert logits_after(llama) == saved["logits"]


def test_a_kill_while_saving_leaves_whole_sessions(
    make_llama: Callable[..., Any],
    model_files: Callable[..., Path],
    tmp_path: Path,
    seed: int,
    rounds: int,
) -> None:
    draw = random.Random(seed)
    order = {"do": "save_on", "model": str(model_files("llama")), "depot": str(tmp_path / "depot")}
    llama, checked = make_llama(), 0
    for _ in range(4 * rounds):
        command = [sys.executable, str(CHILD), json.dumps(order)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(draw.uniform(0.05, 0.6))
            process.kill()
        with open_depot(str(tmp_path / "depot")) as depot:
            states = States(llama, depot, piece_tokens=16)
            for session in states.store.list():
                assert states.store.verify(session["id"]) == []
                checked += 1
            cached = states.restore([*tokens_of(1000), 7])
            assert states.sequence.tokens == tokens_of(1000)[:cached]
    assert checked > 0


def test_what_is_no_state_of_the_llama_is_refused(
    make_llama: Callable[..., Any], tmp_path: Path
) -> None:
    with open_depot(str(tmp_path / "depot")) as depot:
        llama = make_llama()
        with pytest.raises(kvdepot.InputError, match="piece_tokens is 0; allowed: 1 or more"):
            States(llama, depot, piece_tokens=0)
        with pytest.raises(kvdepot.InputError, match="embedding is True"):
            States(make_llama(embedding=True), depot)
        with pytest.raises(kvdepot.InputError, match="attention_type is non-causal"):
            States(make_llama(attention_type=1), depot)
        states = States(llama, depot)
        assert states.save()["cache_write_tokens"] == 0, "nothing was computed"
        llama.eval(tokens_of(40))
        llama.n_tokens = 30
        with pytest.raises(kvdepot.InputError, match="state's tokens is 40; allowed: 30"):
            states.save()
        # Positions with a hole.
        import llama_cpp

        memory = llama_cpp.llama_get_memory(llama.ctx)
        assert llama_cpp.llama_memory_seq_rm(memory, 0, 10, 20)
        with pytest.raises(kvdepot.InputError, match="position: 20 is not allowed; allowed: 10"):
            states.save()
