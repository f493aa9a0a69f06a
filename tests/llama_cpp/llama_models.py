"""Small models with random weights, as GGUF files, made with the `gguf` package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter, TokenType

EMBEDDING = 64
# A row of a head is one block of a quantised type.
HEADS, KV_HEADS, HEAD = 4, 2, 32
FEED_FORWARD = 128
CONTEXT = 8192
# BOS, EOS and unknown, a token for each byte, and two words of chat templates.
SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
VOCABULARY = len(SPECIAL) + 256
WINDOW = 48
STATE, INNER, CONVOLUTION, RANK = 16, 128, 4, 8


def llama(path: Path, seed: int = 1, layers: int = 4) -> Path:
    """A Llama: attention to all tokens in each layer."""
    with _Model(path, "llama", seed, layers) as model:
        model.attention_keys()
        model.outer()
        for layer in range(layers):
            model.attention(layer)
            model.feed_forward(layer)
    return path


def gemma(path: Path, seed: int = 1, layers: int = 6) -> Path:
    """A Gemma 3: all but each sixth layer attend to the last `WINDOW` tokens."""
    with _Model(path, "gemma3", seed, layers) as model:
        model.attention_keys()
        model.writer.add_sliding_window(WINDOW)
        model.outer()
        for layer in range(layers):
            model.attention(layer)
            for name, size in (("attn_q_norm", HEAD), ("attn_k_norm", HEAD)):
                model.ones(f"blk.{layer}.{name}.weight", size)
            for name in ("post_attention_norm", "post_ffw_norm"):
                model.ones(f"blk.{layer}.{name}.weight", EMBEDDING)
            model.feed_forward(layer)
    return path


def mamba(path: Path, seed: int = 1, layers: int = 3) -> Path:
    """A Mamba: recurrent layers alone."""
    with _Model(path, "mamba", seed, layers) as model:
        model.recurrent_keys()
        model.writer.add_feed_forward_length(0)
        model.writer.add_head_count(0)
        model.outer()
        for layer in range(layers):
            model.recurrent(layer)
    return path


def jamba(path: Path, seed: int = 1, layers: int = 4) -> Path:
    """A Jamba: each second layer is recurrent, the others attend to all tokens."""
    with _Model(path, "jamba", seed, layers) as model:
        model.recurrent_keys()
        model.writer.add_feed_forward_length(FEED_FORWARD)
        # Its heads are as wide as the model together.
        model.writer.add_head_count(EMBEDDING // HEAD)
        kv_heads = [0 if layer % 2 == 0 else KV_HEADS for layer in range(layers)]
        model.writer.add_head_count_kv(kv_heads)
        model.writer.add_expert_count(0)
        model.writer.add_expert_used_count(0)
        model.outer()
        for layer in range(layers):
            if layer % 2 == 0:
                model.recurrent(layer)
                for name, size in (("dt", RANK), ("b", STATE), ("c", STATE)):
                    model.ones(f"blk.{layer}.ssm_{name}_norm.weight", size)
            else:
                model.attention(layer, EMBEDDING // HEAD)
            model.feed_forward(layer)
    return path


class _Model:
    def __init__(self, path: Path, architecture: str, seed: int, layers: int) -> None:
        self.writer = GGUFWriter(path, architecture)
        self.random = np.random.default_rng(seed)
        self.writer.add_name(f"random {architecture}")
        self.writer.add_context_length(CONTEXT)
        self.writer.add_embedding_length(EMBEDDING)
        self.writer.add_block_count(layers)
        self.writer.add_layer_norm_rms_eps(1e-5)
        self._tokenizer()

    def __enter__(self) -> _Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()

    def _tokenizer(self) -> None:
        writer = self.writer
        tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
        kinds = [TokenType.UNKNOWN, *[TokenType.CONTROL] * (len(SPECIAL) - 1)]
        kinds += [TokenType.BYTE] * 256
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0] * VOCABULARY)
        writer.add_token_types([int(kind) for kind in kinds])
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_space_prefix(False)
        writer.add_vocab_size(VOCABULARY)

    def attention_keys(self) -> None:
        self.writer.add_feed_forward_length(FEED_FORWARD)
        self.writer.add_head_count(HEADS)
        self.writer.add_head_count_kv(KV_HEADS)
        self.writer.add_key_length(HEAD)
        self.writer.add_value_length(HEAD)
        self.writer.add_rope_dimension_count(HEAD)
        self.writer.add_rope_freq_base(10000.0)

    def recurrent_keys(self) -> None:
        self.writer.add_ssm_conv_kernel(CONVOLUTION)
        self.writer.add_ssm_inner_size(INNER)
        self.writer.add_ssm_state_size(STATE)
        self.writer.add_ssm_time_step_rank(RANK)

    def outer(self) -> None:
        # Large enough that greedy tokens differ from place to place.
        self.matrix("token_embd.weight", VOCABULARY, EMBEDDING, scale=1.0)
        self.ones("output_norm.weight", EMBEDDING)
        self.matrix("output.weight", VOCABULARY, EMBEDDING)

    def attention(self, layer: int, heads: int | None = None) -> None:
        heads = heads or HEADS
        self.ones(f"blk.{layer}.attn_norm.weight", EMBEDDING)
        self.matrix(f"blk.{layer}.attn_q.weight", heads * HEAD, EMBEDDING)
        self.matrix(f"blk.{layer}.attn_k.weight", KV_HEADS * HEAD, EMBEDDING)
        self.matrix(f"blk.{layer}.attn_v.weight", KV_HEADS * HEAD, EMBEDDING)
        self.matrix(f"blk.{layer}.attn_output.weight", EMBEDDING, heads * HEAD)

    def feed_forward(self, layer: int) -> None:
        self.ones(f"blk.{layer}.ffn_norm.weight", EMBEDDING)
        self.matrix(f"blk.{layer}.ffn_gate.weight", FEED_FORWARD, EMBEDDING)
        self.matrix(f"blk.{layer}.ffn_up.weight", FEED_FORWARD, EMBEDDING)
        self.matrix(f"blk.{layer}.ffn_down.weight", EMBEDDING, FEED_FORWARD)

    def recurrent(self, layer: int) -> None:
        self.ones(f"blk.{layer}.attn_norm.weight", EMBEDDING)
        self.matrix(f"blk.{layer}.ssm_in.weight", 2 * INNER, EMBEDDING)
        self.matrix(f"blk.{layer}.ssm_conv1d.weight", INNER, CONVOLUTION, kind=np.float32)
        self.add(f"blk.{layer}.ssm_conv1d.bias", np.zeros(INNER, np.float32))
        self.matrix(f"blk.{layer}.ssm_x.weight", RANK + 2 * STATE, INNER)
        self.matrix(f"blk.{layer}.ssm_dt.weight", INNER, RANK)
        self.add(f"blk.{layer}.ssm_dt.bias", np.full(INNER, 0.1, np.float32))
        decay = -np.tile(np.arange(1, STATE + 1, dtype=np.float32), (INNER, 1))
        self.add(f"blk.{layer}.ssm_a", decay)
        self.add(f"blk.{layer}.ssm_d", np.ones(INNER, np.float32))
        self.matrix(f"blk.{layer}.ssm_out.weight", EMBEDDING, INNER)

    def matrix(
        self, name: str, rows: int, columns: int, scale: float | None = None, kind: Any = np.float16
    ) -> None:
        scale = 1.5 / columns**0.5 if scale is None else scale
        self.add(name, (self.random.standard_normal((rows, columns)) * scale).astype(kind))

    def ones(self, name: str, size: int) -> None:
        self.add(name, np.ones(size, np.float32))

    def add(self, name: str, tensor: Any) -> None:
        self.writer.add_tensor(name, tensor)
