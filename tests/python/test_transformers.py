"""The prefix cache for transformers: real models with random weights, on the CPU."""

from __future__ import annotations

import copy
import logging
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forks
import kvdepot
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
cache_utils = pytest.importorskip("transformers.cache_utils")

from prefix_models import (  # noqa: E402
    KINDS,
    PIECE,
    WINDOW,
    greedy,
    logits,
    model_of,
    open_depot,
    prefixes_of,
    prompt_of,
    same,
)


@pytest.fixture
def depot(tmp_path: Path) -> Iterator[kvdepot.Depot]:
    with open_depot(tmp_path / "kv") as depot:
        yield depot


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_prompt_begins_where_the_first_ended(depot: kvdepot.Depot, kind: str) -> None:
    model = model_of(kind)
    prefixes = prefixes_of(depot, model)
    prompt = prompt_of(90)
    first = prefixes.generate(prompt, max_new_tokens=12, do_sample=False)
    assert first.cached_tokens == 0
    assert torch.equal(first.output, greedy(model, prompt))
    longer = torch.cat([first.output, prompt_of(20, seed=2)], dim=1)
    cache, cached = prefixes.load(longer)
    assert cached == 101
    assert same(logits(model, longer[:, cached:], cache), logits(model, longer)[:, cached:])
    second = prefixes.generate(longer, max_new_tokens=12, do_sample=False)
    assert second.cached_tokens == 101
    assert torch.equal(second.output, greedy(model, longer))
    again = prefixes.generate(prompt, max_new_tokens=12, do_sample=False)
    # Pieces of the longer conversation; with windows what was stored before the last token.
    assert again.cached_tokens == (80 if kind == "qwen3" else 89)
    assert again.cache_write_tokens == 0
    assert torch.equal(again.output, first.output)


CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
import test_transformers
test_transformers.child(*sys.argv[2:])
"""


def child(does: str, folder: str) -> None:
    for kind in KINDS:
        model, prompt = model_of(kind), prompt_of(130)
        with open_depot(Path(folder) / "kv") as depot:
            prefixes = prefixes_of(depot, model)
            if does == "save":
                cache, said = prefixes.prefill(prompt[:, :100])
                assert said == {"cached_tokens": 0, "cache_write_tokens": 100}
            else:
                cache, cached = prefixes.load(prompt)
                assert cached == 100
            torch.save(logits(model, prompt[:, 100:], cache), f"{folder}/{kind}.{does}")


def test_another_process_goes_on_to_the_bit(tmp_path: Path) -> None:
    for does in ("save", "load"):
        command = [*forks.command(), "-c", CHILD, str(Path(__file__).parent), does, str(tmp_path)]
        subprocess.run(command, check=True, timeout=200)
    for kind in KINDS:
        saved, loaded = (torch.load(tmp_path / f"{kind}.{does}") for does in ("save", "load"))
        # The same steps, from the cache that was computed and the one that was stored.
        assert torch.equal(saved, loaded)
        whole = logits(model_of(kind), prompt_of(130))[:, 100:]
        assert same(loaded, whole)
        assert torch.equal(loaded.argmax(-1), whole.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_types_come_back_to_the_bit(depot: kvdepot.Depot, dtype: Any) -> None:
    prefixes = prefixes_of(depot, model_of("gemma3", dtype=dtype))
    cache, _ = prefixes.prefill(prompt_of(50))
    loaded, cached = prefixes.load(torch.cat([prompt_of(50), prompt_of(9)], dim=1))
    assert cached == 50
    for one, other in zip(cache.layers, loaded.layers, strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)
        assert one.get_seq_length() == other.get_seq_length() == 50
        assert one.get_mask_sizes(3) == other.get_mask_sizes(3)


def test_the_longest_beginning_is_loaded(depot: kvdepot.Depot) -> None:
    for kind, shared in (("qwen3", 48), ("gemma3", 0)):
        prefixes = prefixes_of(depot, model_of(kind))
        prompt = prompt_of(100)
        for tokens in (40, 70, 60):
            prefixes.prefill(prompt[:, :tokens])
        prefixes.prefill(torch.cat([prompt_of(50, seed=3), prompt], dim=1))
        assert prefixes.load(prompt)[1] == 70
        # The last token is left to compute; a window cannot take a token back.
        assert prefixes.load(prompt[:, :70])[1] == (69 if kind == "qwen3" else 60)
        assert prefixes.load(prompt[0, :61])[1] == 60
        # It goes apart at token 50, inside what is stored.
        other = torch.cat([prompt[:, :50], prompt_of(30, seed=4)], dim=1)
        assert prefixes.load(other)[1] == (shared or 40)
        assert prefixes.load(prompt[:, :1])[1] == 0
        assert prefixes.load(prompt_of(80, seed=5))[1] == 0


def test_ten_turns_write_what_is_new(depot: kvdepot.Depot) -> None:
    model = model_of("qwen3")
    prefixes = prefixes_of(depot, model)
    said, stored = prompt_of(50), 0
    for turn in range(10):
        answer = prefixes.generate(said, max_new_tokens=11, do_sample=False)
        assert torch.equal(answer.output, greedy(model, said, 11))
        assert answer.cached_tokens == stored
        # A piece that was not full is written again when it has grown.
        end = answer.output.shape[1] - 1
        assert answer.cache_write_tokens == end - stored // PIECE * PIECE
        stored = end
        said = torch.cat([answer.output, prompt_of(7, seed=turn)], dim=1)


def test_other_weights_never_hit(depot: kvdepot.Depot) -> None:
    prompt = prompt_of(60)
    model = model_of("qwen3")
    prefixes = prefixes_of(depot, model)
    prefixes.prefill(prompt)
    assert prefixes.load(prompt)[1] == 59
    assert prefixes_of(depot, model_of("qwen3")).load(prompt)[1] == 59
    others = [
        model_of("qwen3", seed=1),
        model_of("qwen3", dtype=torch.bfloat16),
        model_of("qwen3", rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
        model_of("qwen3", rms_norm_eps=1e-5),
    ]
    for other in others:
        assert prefixes_of(depot, other).load(prompt)[1] == 0
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] += 1
    assert prefixes.load(prompt)[1] == 0
    named = prefixes_of(depot, model, weights="one")
    named.prefill(prompt)
    assert prefixes_of(depot, model, weights="one").load(prompt)[1] == 59
    assert prefixes_of(depot, model, weights="two").load(prompt)[1] == 0


def test_weights_that_lie_where_others_lay_are_others(depot: kvdepot.Depot) -> None:
    prompt, model = prompt_of(60), model_of("qwen3")
    prefixes = prefixes_of(depot, model)
    prefixes.prefill(prompt)
    layer = model.model.layers[1].mlp.down_proj
    for _ in range(20):
        # As whoever takes a weight away before the next one is there.
        shape, was = layer.weight.shape, layer.weight.data_ptr()
        del layer.weight
        layer.weight = torch.nn.Parameter(torch.ones(shape))
        assert prefixes.load(prompt)[1] == 0
        if layer.weight.data_ptr() == was:
            return
        layer.weight = torch.nn.Parameter(torch.randn(shape))
        prefixes.prefill(prompt)
    pytest.skip("no tensor came to lie where another had lain")


def test_weights_are_those_of_a_directory(depot: kvdepot.Depot, tmp_path: Path) -> None:
    prompt, loads = prompt_of(60), []
    for seed in (0, 1, 0):
        model = model_of("qwen3", seed=seed)
        model.save_pretrained(tmp_path / f"model{seed}")
        prefixes = prefixes_of(depot, model, weights=tmp_path / f"model{seed}")
        loads.append(prefixes.load(prompt)[1])
        prefixes.prefill(prompt)
    assert loads == [0, 0, 59]
    (tmp_path / "empty").mkdir()
    for wrong in (tmp_path / "empty", ""):
        with pytest.raises(kvdepot.InputError, match=r"weights is '.*'; allowed: "):
            prefixes_of(depot, model, weights=wrong)


class Adapter(torch.nn.Module):
    """What PEFT puts in the place of a linear layer."""

    def __init__(self, base_layer: Any) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora = torch.nn.Linear(base_layer.in_features, base_layer.out_features, bias=False)
        self.active_adapters = ["one"]
        self.disable_adapters = False

    def forward(self, states: Any) -> Any:
        base = self.base_layer(states)
        return base if self.disable_adapters else base + self.lora(states)


@pytest.mark.parametrize("weights", [None, "named"])
def test_adapters_have_prefixes_of_their_own(depot: kvdepot.Depot, weights: str | None) -> None:
    prompt, model = prompt_of(60), model_of("qwen3")
    attention = model.model.layers[0].self_attn
    attention.k_proj = Adapter(attention.k_proj)
    prefixes = prefixes_of(depot, model, weights=weights)
    prefixes.prefill(prompt)
    assert prefixes.load(prompt)[1] == 59
    attention.k_proj.disable_adapters = True
    assert prefixes.load(prompt)[1] == 0
    attention.k_proj.disable_adapters = False
    assert prefixes.load(prompt)[1] == 59
    with torch.no_grad():
        attention.k_proj.lora.weight.mul_(2)
    assert prefixes.load(prompt)[1] == 0


@pytest.mark.parametrize("how", ["no_grad", "inference_mode", "made under it", "data"])
def test_weights_that_change_in_place_are_other_weights(depot: kvdepot.Depot, how: str) -> None:
    prompt, model = prompt_of(60), model_of("qwen3")
    if how == "made under it":
        how = "inference_mode"
        with torch.inference_mode():
            model = copy.deepcopy(model)
    prefixes = prefixes_of(depot, model)
    prefixes.prefill(prompt)
    assert prefixes.load(prompt)[1] == 59
    weight = model.model.layers[0].self_attn.v_proj.weight
    if how == "data":
        weight.data.mul_(2)
    else:
        with getattr(torch, how)():
            weight.mul_(2)
    assert prefixes.load(prompt)[1] == 0
    answer = prefixes.generate(prompt, max_new_tokens=12, do_sample=False)
    assert torch.equal(answer.output, greedy(model, prompt))


def flip(files: list[Path]) -> None:
    for file in files:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 4
        file.write_bytes(data)


def files_of(tmp_path: Path, least: int) -> set[Path]:
    """Files of blocks of at least so many bytes: each has a header of a page."""
    files = (file for file in (tmp_path / "kv").rglob("*") if file.is_file())
    return {file for file in files if file.stat().st_size >= 4096 + least}


def test_what_does_not_verify_is_computed_again(tmp_path: Path) -> None:
    model, prompt = model_of("qwen3"), prompt_of(90)
    piece = 2 * 2 * 2 * PIECE * 16 * 4
    with open_depot(tmp_path / "kv") as depot:
        prefixes_of(depot, model).prefill(prompt[:, :80])
    files = sorted(files_of(tmp_path, piece))
    assert len(files) == 5
    flip(files[:1])
    with open_depot(tmp_path / "kv") as depot:
        prefixes = prefixes_of(depot, model)
        cache, cached = prefixes.load(prompt)
        # The pieces before it are of use.
        assert cached in range(0, 80, PIECE)
        assert same(logits(model, prompt[:, cached:], cache), logits(model, prompt)[:, cached:])
        answer = prefixes.generate(prompt, max_new_tokens=12, do_sample=False)
        assert torch.equal(answer.output, greedy(model, prompt))
        assert prefixes.load(torch.cat([answer.output, prompt], dim=1))[1] == 101


def test_a_window_that_does_not_verify_falls_to_the_session_before(tmp_path: Path) -> None:
    model, prompt = model_of("gemma3"), prompt_of(90)
    windows = 2 * 2 * 2 * (WINDOW - 1) * 16 * 4
    with open_depot(tmp_path / "kv") as depot:
        prefixes = prefixes_of(depot, model)
        prefixes.prefill(prompt[:, :40])
        before = files_of(tmp_path, windows)
        prefixes.prefill(prompt[:, :60])
    new = files_of(tmp_path, windows) - before
    assert len(new) == 1
    flip(list(new))
    with open_depot(tmp_path / "kv") as depot:
        prefixes = prefixes_of(depot, model)
        assert prefixes.load(prompt)[1] == 40
        answer = prefixes.generate(prompt, max_new_tokens=12, do_sample=False)
        assert (answer.cached_tokens, prefixes.load(prompt)[1]) == (40, 89)
        assert torch.equal(answer.output, greedy(model, prompt))


def test_a_depot_that_is_gone_costs_time_only(
    depot: kvdepot.Depot, caplog: pytest.LogCaptureFixture
) -> None:
    model, prompt = model_of("gemma3"), prompt_of(40)
    prefixes = prefixes_of(depot, model)
    depot.close()
    with caplog.at_level(logging.WARNING, logger="kvdepot.transformers"):
        answer = prefixes.generate(prompt, max_new_tokens=12, do_sample=False)
    assert (answer.cached_tokens, answer.cache_write_tokens) == (0, 0)
    assert torch.equal(answer.output, greedy(model, prompt))
    assert "the prompt was not stored" in caplog.text
    with pytest.raises(kvdepot.ClosedError):
        prefixes.load(prompt)


def test_short_prompts_are_left_alone(depot: kvdepot.Depot) -> None:
    for kind in KINDS:
        prefixes = prefixes_of(depot, model_of(kind), min_tokens=30)
        short = prefixes.generate(prompt_of(20), max_new_tokens=5, do_sample=False)
        assert short.cache_write_tokens == 0
        assert prefixes.generate([7], max_new_tokens=2).cached_tokens == 0
    assert depot.namespaces() == [] or all(one[2] == 0 for one in depot.namespaces())


def test_the_padding_token_in_a_prompt_is_a_token(depot: kvdepot.Depot) -> None:
    model, prompt = model_of("qwen3", pad_token_id=5, eos_token_id=6), prompt_of(60)
    prompt[0, :9] = 5
    prefixes = prefixes_of(depot, model)
    for _ in range(2):
        answer = prefixes.generate(prompt, max_new_tokens=12, do_sample=False)
        assert torch.equal(answer.output, greedy(model, prompt))


@pytest.mark.parametrize(
    ("said", "options"),
    [
        ("attention_mask", {"attention_mask": torch.tensor([[0] + [1] * 39])}),
        ("num_beams is 2", {"num_beams": 2}),
        ("num_return_sequences is 3", {"num_return_sequences": 3, "do_sample": True}),
        ("prefill_chunk_size is 16", {"prefill_chunk_size": 16}),
        ("cache_implementation is 'quantized'", {"cache_implementation": "quantized"}),
        ("'pixel_values'", {"pixel_values": torch.zeros(1)}),
        ("'past_key_values'", {"past_key_values": None}),
        ("'assistant_model'", {"assistant_model": None}),
    ],
)
def test_ways_to_generate_are_refused(
    depot: kvdepot.Depot, said: str, options: dict[str, Any]
) -> None:
    with pytest.raises(kvdepot.InputError, match=rf"{said}.*; allowed: "):
        prefixes_of(depot, model_of("qwen3")).generate(prompt_of(40), **options)


def test_what_a_model_asks_for_by_itself_is_refused_too(depot: kvdepot.Depot) -> None:
    model, prompt = model_of("qwen3"), prompt_of(40)
    prefixes = prefixes_of(depot, model)
    model.generation_config.num_beams = 2
    for options in ({}, {"generation_config": transformers.GenerationConfig(max_new_tokens=4)}):
        with pytest.raises(kvdepot.InputError, match="num_beams is 2; allowed: "):
            prefixes.generate(prompt, **options)
    prefixes.generate(prompt, num_beams=1, max_new_tokens=4)


def test_numbers_that_are_no_tokens_are_refused(depot: kvdepot.Depot) -> None:
    prefixes = prefixes_of(depot, model_of("qwen3"))
    for wrong in (-1, 1 << 32):
        with pytest.raises(
            kvdepot.InputError, match=f"input_ids is a sequence with {wrong}; allowed"
        ):
            prefixes.load([1, wrong, 2])


def test_caches_and_batches_are_refused(depot: kvdepot.Depot) -> None:
    model, prompt = model_of("gemma3"), prompt_of(40)
    prefixes = prefixes_of(depot, model)
    cache, _ = prefixes.prefill(prompt)
    quantised = object.__new__(transformers.QuantizedCache)
    quantised.layers = cache.layers
    layer = object.__new__(cache_utils.QuantoQuantizedLayer)
    mixed = transformers.DynamicCache(config=model.config)
    mixed.layers = [*cache.layers[:3], layer]
    cases = [
        ("cache is a StaticCache", transformers.StaticCache(model.config, max_cache_len=64)),
        ("layers.3. is a QuantoQuantizedLayer", mixed),
        ("cache is of 0 tokens; allowed: 1 to 40", transformers.DynamicCache(config=model.config)),
        ("cache is of 0 tokens; allowed: 1 to 40", transformers.DynamicCache()),
    ]
    for said, wrong in cases:
        with pytest.raises(kvdepot.InputError, match=said):
            prefixes.save(prompt, wrong)
    with pytest.raises(kvdepot.InputError, match="a QuantizedCache; allowed: a DynamicCache"):
        prefixes.save(prompt, quantised)
    with pytest.raises(kvdepot.InputError, match=r"of 40 tokens; allowed: 1 to 30"):
        prefixes.save(prompt[:, :30], cache)
    with pytest.raises(kvdepot.InputError, match=r"input_ids.shape is \(2, 40\)"):
        prefixes.load(prompt.repeat(2, 1))
    with pytest.raises(kvdepot.InputError, match=r"input_ids.shape is \(1, 0\)"):
        prefixes.load(prompt[:, :0])
    other = transformers.DynamicCache(config=model_of("qwen3").config)
    logits(model_of("qwen3"), prompt, other)
    with pytest.raises(kvdepot.InputError, match=r"layers\[2\] is empty"):
        prefixes.save(prompt, other)


def test_a_cache_without_windows_is_cut_to_them(depot: kvdepot.Depot) -> None:
    model, prompt = model_of("gemma3"), prompt_of(60)
    prefixes = prefixes_of(depot, model)
    whole = transformers.DynamicCache()
    logits(model, prompt[:, :50], whole)
    assert prefixes.save(prompt, whole)["cache_write_tokens"] == 50
    cache, cached = prefixes.load(prompt)
    assert cached == 50
    assert same(logits(model, prompt[:, 50:], cache), logits(model, prompt)[:, 50:])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_on_a_device_goes_on_there(depot: kvdepot.Depot, kind: str) -> None:
    model = model_of(kind, dtype=torch.bfloat16).to("cuda")
    prefixes = prefixes_of(depot, model)
    prompt = prompt_of(130).to("cuda")
    cache, said = prefixes.prefill(prompt[:, :100])
    assert said == {"cached_tokens": 0, "cache_write_tokens": 100}
    loaded, cached = prefixes.load(prompt)
    assert cached == 100
    for one, other in zip(cache.layers, loaded.layers, strict=True):
        assert (one.keys.device, other.keys.device) == (prompt.device, prompt.device)
        assert torch.equal(one.keys[:, :, -other.keys.shape[2] :], other.keys)
        assert torch.equal(one.values[:, :, -other.values.shape[2] :], other.values)
    rest = prompt[:, 100:]
    assert torch.equal(logits(model, rest, cache), logits(model, rest, loaded))
    generated = prefixes.generate(prompt, max_new_tokens=12, do_sample=False)
    assert generated.cached_tokens in (96, 100)
    assert generated.output.device == prompt.device
    # Other kernels than the CPU's, same weights: another depot's pieces are of use all the same.
    again = prefixes_of(depot, model_of(kind, dtype=torch.bfloat16))
    assert again.load(prompt.cpu())[1] >= 100


def test_models_are_refused(depot: kvdepot.Depot) -> None:
    long = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    cases = [
        ("rope_type is 'dynamic'", model_of("qwen3", rope_parameters=long)),
        ("model.dtype is torch.float64", model_of("qwen3", dtype=torch.float64)),
        ("model.training is True", model_of("qwen3").train()),
        ("devices is meta", model_of("qwen3").to("meta")),
    ]
    for said, model in cases:
        with pytest.raises(kvdepot.InputError, match=rf"{said}; allowed: "):
            prefixes_of(depot, model)
    prefixes = prefixes_of(depot, model := model_of("qwen3"))
    model.train()
    with pytest.raises(kvdepot.InputError, match="training is True"):
        prefixes.generate(prompt_of(40))
    with pytest.raises(kvdepot.InputError, match="piece_tokens is 0; allowed: 1 or more"):
        prefixes_of(depot, model_of("qwen3"), piece_tokens=0)


def test_recurrent_states_are_refused(depot: kvdepot.Depot) -> None:
    config = transformers.MambaConfig(
        vocab_size=128, hidden_size=32, state_size=8, num_hidden_layers=2
    )
    with pytest.raises(kvdepot.InputError, match=r"LinearAttentionLayer; allowed: DynamicLayer"):
        prefixes_of(depot, transformers.MambaForCausalLM(config).eval())
