"""A small random-weights Qwen3 and its tokenizer, made on the spot.

Run as a program (`python -m vllm_demo.model DIRECTORY`), because it needs torch
and transformers, which the rest of the demo does not import.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

# 16 KiB of float32 KV a token (8 layers, keys and values of 4 heads of 64): a
# prompt of 8,000 tokens has 125 MiB, enough that moving it takes visible time,
# while two cores can still compute it in seconds.
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 32768,
}
KV_BYTES_PER_TOKEN = 8 * 2 * 4 * 64 * 4

# Weights four times larger than transformers' default: with 0.02 a random model
# answers nearly the same whatever its context, and a wrong block would not show.
WEIGHT_SCALE = 0.08

# Tokens of a window, in the variants that have one: every second layer of one, which tests models
# with several KV groups, and every layer of the other.
SLIDING_WINDOW = 256

# A DeepSeek whose layers keep one latent vector a token, which is the same on every rank. vLLM's
# kernels for the CPU know these sizes of it alone; experts from the second layer on.
LATENT = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "vocab_size": SHAPE["vocab_size"],
    "max_position_embeddings": SHAPE["max_position_embeddings"],
}

_TEXT = "A block that does not verify is a miss, never an answer. 0123456789"


def make(
    directory: Path,
    *,
    seed: int = 0,
    sliding: bool = False,
    window: bool = False,
    latent: bool = False,
) -> None:
    """Write config, weights and tokenizer into `directory`, unless they are there.

    `seed` varies the weights only; `sliding` makes a Gemma3 instead, whose every
    second layer has a sliding window, `window` a Mistral, whose every layer has,
    and `latent` a DeepSeek.
    """
    shape = LATENT if latent else SHAPE
    recipe = {"shape": shape, "scale": WEIGHT_SCALE, "seed": seed, "sliding": sliding}
    if window:
        recipe["window"] = SLIDING_WINDOW
    stamp = directory / "recipe.json"
    if stamp.exists() and json.loads(stamp.read_text()) == recipe:
        return
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import (
        DeepseekV2Config,
        DeepseekV2ForCausalLM,
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        MistralConfig,
        MistralForCausalLM,
        PreTrainedTokenizerFast,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    directory.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    common = {
        **shape,
        "initializer_range": WEIGHT_SCALE,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    torch.manual_seed(seed)
    if sliding:
        kinds = ["full_attention", "sliding_attention"] * (SHAPE["num_hidden_layers"] // 2)
        config = Gemma3TextConfig(**common, sliding_window=SLIDING_WINDOW, layer_types=kinds)
        model = Gemma3ForCausalLM(config).to(torch.float32)
    elif window:
        model = MistralForCausalLM(MistralConfig(**common, sliding_window=SLIDING_WINDOW))
        model = model.to(torch.float32)
    elif latent:
        model = DeepseekV2ForCausalLM(DeepseekV2Config(**common)).to(torch.float32)
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**common)).to(torch.float32)
    model.save_pretrained(directory)

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        [_TEXT], vocab_size=SHAPE["vocab_size"], special_tokens=["<pad>", "<s>", "</s>"]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
    ).save_pretrained(directory)
    stamp.write_text(json.dumps(recipe))


if __name__ == "__main__":
    make(
        Path(sys.argv[1]),
        seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0,
        sliding="--sliding" in sys.argv,
        window="--window" in sys.argv,
        latent="--latent" in sys.argv,
    )
