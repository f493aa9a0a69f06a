"""What a caller gives the prefix cache for transformers: token ids of any kind, a model that it
changes, and a real model with real text."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kvdepot
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvdepot.transformers import PrefixCache  # noqa: E402
from prefix_models import (  # noqa: E402
    greedy,
    logits,
    model_of,
    open_depot,
    prefixes_of,
    prompt_of,
)
from real_model import REASON, smollm  # noqa: E402


@pytest.fixture
def depot(tmp_path: Path) -> Iterator[kvdepot.Depot]:
    with open_depot(tmp_path / "kv") as depot:
        yield depot


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ("input_ids is text .'Hello'.; allowed: token IDs", "Hello"),
        ("input_ids is text .b'Hello'.; allowed: token IDs", b"Hello"),
        ("input_ids is a list that is not a tensor .*; allowed: ", [[1, 2, 3], [4, 5]]),
        ("input_ids is a list that is not a tensor .*; allowed: ", ["Hello"]),
        ("input_ids is a NoneType that is not a tensor .*; allowed: ", None),
        ("input_ids is a list that is not a tensor .*; allowed: ", [1 << 70]),
        ("input_ids.shape is .2, 3.; allowed: ", [[1, 2, 3], [4, 5, 6]]),
        ("input_ids.dtype is torch.float32; allowed: integers", [1.5, 2.0]),
        ("input_ids.dtype is torch.bool; allowed: integers", [True, False]),
        ("input_ids is a mapping with nothing; allowed: attention_mask and input_ids", {}),
        ("mapping with 'input_ids', 'images'; allowed", {"input_ids": [1, 2], "images": [0]}),
        ("attention_mask is of .1, 3. with 1 ones; allowed: 3 ones", (["a", "a b c"], True)),
        ("input_ids.shape is .2, 3.; allowed: ", (["a b c", "c b a"], True)),
        ("input_ids is a list that is not a tensor .*; allowed: ", (["a", "a b c"], False)),
    ],
)
def test_input_that_is_not_one_sequence_of_tokens_is_refused(
    depot: kvdepot.Depot, said: str, wrong: Any
) -> None:
    model = model_of("qwen3")
    prefixes = prefixes_of(depot, model)
    if isinstance(wrong, tuple):
        texts, padded = wrong
        wrong = tokenizer()(texts, padding=padded)
        if "attention_mask" in said:
            wrong = {name: ids[:1] for name, ids in wrong.items()}
    calls = (prefixes.load, prefixes.prefill, prefixes.generate)
    for call in (*calls, lambda ids: prefixes.save(ids, transformers.DynamicCache())):
        with pytest.raises(kvdepot.InputError, match=said):
            call(wrong)


def tokenizer() -> Any:
    """Words that are letters; it pads on the left, as for answers."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<pad>": 0} | {letter: at for at, letter in enumerate("abcdefghij", 1)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>")
    fast.padding_side = "left"
    fast.chat_template = "{% for one in messages %}{{ one.content }} {% endfor %}"
    return fast


def test_what_a_tokenizer_returns_is_a_prompt(depot: kvdepot.Depot) -> None:
    model = model_of("qwen3")
    prefixes = prefixes_of(depot, model)
    said = "a b c d e f g h i j " * 5
    first = tokenizer().apply_chat_template(
        [{"role": "user", "content": said}], return_tensors="pt", return_dict=True
    )
    assert isinstance(first, transformers.BatchEncoding)
    answer = prefixes.generate(first, max_new_tokens=4, do_sample=False)
    assert torch.equal(answer.output, greedy(model, first["input_ids"], 4))
    for again in (first, dict(first), tokenizer()(said), tokenizer()([said]), first["input_ids"]):
        assert prefixes.load(again)[1] == 48
    # As model.generate takes it.
    assert prefixes.generate(**first, max_new_tokens=4).cached_tokens == 48
    mask = [1] * 50
    assert prefixes.generate(first["input_ids"], attention_mask=mask).cached_tokens == 48


@pytest.mark.parametrize("weights", [None, "named"])
def test_a_model_of_another_type_goes_on_with_prefixes_of_its_own(
    depot: kvdepot.Depot, weights: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    model, prompt = model_of("gemma3"), prompt_of(60)
    prefixes = prefixes_of(depot, model, weights=weights)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    first, old = prefixes.generate(prompt, **options), prefixes.load(prompt)[0]
    model.bfloat16()
    with caplog.at_level(logging.WARNING, logger="kvdepot.transformers"):
        other = prefixes.generate(prompt, **options)
        assert (other.cached_tokens, other.cache_write_tokens > 0) == (0, True)
        assert torch.equal(other.output, greedy(model, prompt, 4))
        cache, cached = prefixes.load(prompt)
        assert (cached, cache.layers[0].keys.dtype) == (59, torch.bfloat16)
        assert prefixes.generate(prompt, **options).cached_tokens == 59
        with pytest.raises(kvdepot.InputError, match=r"dtype is torch.float32; .* of the model"):
            prefixes.save(prompt, old)
        # Rounded weights are others, unless their name says that they are the same.
        model.float()
        again = prefixes.generate(prompt, **options)
        assert again.cached_tokens == (59 if weights else 0)
    assert not [one for one in caplog.records if one.name == "kvdepot.transformers"]
    assert first.cached_tokens == 0
    model.double()
    with pytest.raises(kvdepot.InputError, match=r"model.dtype is torch.float64; allowed: "):
        prefixes.generate(prompt, **options)


@pytest.mark.stress
def test_a_real_model_goes_on_with_real_text(depot: kvdepot.Depot) -> None:
    file = smollm() or pytest.skip(REASON)
    for needed in ("gguf", "accelerate"):
        pytest.importorskip(needed)
    folder, name = file.parent, file.name
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    page = (Path(__file__).parents[2] / "docs/sessions.md").read_text()[:2000]

    def prompt(question: str) -> Any:
        messages = [{"role": "user", "content": f"{page}\n\n{question}"}]
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )

    prefixes = PrefixCache(depot, model, piece_tokens=128)
    first = prefixes.generate(prompt("What is a session?"), max_new_tokens=12, do_sample=False)
    assert first.cached_tokens == 0
    asked = prompt("What is a piece?")
    second = prefixes.generate(asked, max_new_tokens=12, do_sample=False)
    assert second.cached_tokens >= 256
    assert torch.equal(second.output, greedy(model, asked["input_ids"]))
    # The same steps from the cache in memory and from the one that was stored: to the bit.
    tokens = second.output
    computed, _ = prefixes.prefill(torch.cat([tokens, asked["input_ids"][:, :100]], dim=1))
    longer = torch.cat([tokens, asked["input_ids"][:, :110]], dim=1)
    loaded, cached = prefixes.load(longer)
    assert cached == longer.shape[1] - 10
    rest = longer[:, cached:]
    from_depot = logits(model, rest, loaded)
    assert torch.equal(from_depot, logits(model, rest, computed))
    whole = logits(model, longer)[:, cached:]
    assert torch.allclose(from_depot, whole, rtol=1e-3, atol=1e-2)
