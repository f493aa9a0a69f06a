"""A process with a Llama of its own: `python llama_child.py '{"do": …}'` prints what came of it.

A state is saved whole, too, as llama.cpp has written it, beside its pieces.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import kvdepot
import llama_cpp
import numpy as np
from kvdepot.llama_cpp import KvdepotCache, States

# One thread: several that wait for each other take long on a machine that is busy.
SETTINGS = {"n_ctx": 2048, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
NEXT = 77
"""The token whose logits tell states apart."""


def open_depot(path: str) -> kvdepot.Depot:
    posix = {"path": path, "capacity": "1GiB"}
    return kvdepot.open("Posix", {"posix": posix, "socket": "off"})


def tokens_of(count: int, seed: int = 0) -> list[int]:
    """Tokens of a prompt, those of bytes; a longer prompt of a seed begins with a shorter one's."""
    return [1, *np.random.default_rng(seed).integers(5, 261, count - 1).tolist()]


def logits_after(llama: Any, token: int = NEXT) -> str:
    """What the next token's logits are, to the bit."""
    llama.eval([token])
    logits = llama_cpp.llama_get_logits_ith(llama.ctx, -1)
    values = np.ctypeslib.as_array(logits, shape=(llama.n_vocab(),))
    assert np.isfinite(values).all()
    assert values.std() > 0
    return hashlib.sha256(values.tobytes()).hexdigest()


def run(order: dict[str, Any]) -> dict[str, Any]:
    llama = llama_cpp.Llama(order["model"], **SETTINGS | order.get("settings", {}))
    prompt = tokens_of(order.get("tokens", 700), order.get("seed", 0))
    if order["do"] == "compute":
        llama.eval(prompt)
        return {"logits": logits_after(llama)}
    if order["do"] == "whole":
        states = States(llama, open_depot(order["depot"] + "-none"))
        whole = np.frombuffer(Path(order["file"]).read_bytes(), np.uint8)
        assert states.sequence.put(whole, prompt)
        return {"logits": logits_after(llama)}
    with open_depot(order["depot"]) as depot:
        return HOW[order["do"]](llama, depot, prompt, order)


def save(llama: Any, depot: kvdepot.Depot, prompt: list[int], order: dict[str, Any]) -> Any:
    states = States(llama, depot)
    llama.eval(prompt)
    Path(order["file"]).write_bytes(states.sequence.take().tobytes())
    return {"saved": states.save(), "logits": logits_after(llama)}


def restore(llama: Any, depot: kvdepot.Depot, prompt: list[int], order: dict[str, Any]) -> Any:
    states = States(llama, depot)
    cached = states.restore([*prompt, NEXT])
    whole = Path(order["file"]).read_bytes()
    same = cached > 0 and states.sequence.take().tobytes() == whole
    llama.eval(prompt[cached:])
    return {"cached": cached, "same": same, "logits": logits_after(llama)}


def complete(llama: Any, depot: kvdepot.Depot, prompt: list[int], order: dict[str, Any]) -> Any:
    """Turns of a conversation; each goes on with what was answered."""
    cache = KvdepotCache(llama, depot, background=False).attach()
    cached, texts = [], []
    for turn in range(order["turns"]):
        answer = llama.create_completion(prompt, max_tokens=24, temperature=0, seed=1)
        cached.append(cache.statistics()["last_cached_tokens"])
        texts.append(answer["choices"][0]["text"])
        prompt = llama._input_ids.tolist() + tokens_of(40, turn + 1)[1:]
    return {"cached": cached, "texts": texts, "counts": cache.statistics()}


def save_on(llama: Any, depot: kvdepot.Depot, prompt: list[int], order: dict[str, Any]) -> Any:
    """Conversations that grow, until somebody kills this."""
    states = States(llama, depot, piece_tokens=16)
    print("ready", flush=True)
    for seed in range(1 << 30):
        llama.reset()
        for end in range(40, 1000, 37):
            tokens = tokens_of(end, seed)
            llama.eval(tokens[llama.n_tokens :])
            states.save()


HOW = {"save": save, "restore": restore, "complete": complete, "save_on": save_on}

if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]))), flush=True)
