"""Tiny models of random weights: each is made in a second, and answers other tokens if a block is
wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

VOCABULARY = 320
IMAGE, VISION_START, VISION_END, VIDEO = 260, 261, 262, 263
SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    # With transformers' default of 0.02 a model answers nearly the same whatever its context.
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TRAINED_AT = 512
CODE_FILE = "modeling_tiny.py"


def llama(directory: Path, *, seed: int = 0, **changes: Any) -> Path:
    """A Llama of two layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return save(directory, seed, lambda: LlamaForCausalLM(LlamaConfig(**SHAPE | changes)))


def longrope(directory: Path) -> Path:
    """A Phi-3, whose RoPE has other factors for engines of more than `TRAINED_AT` tokens."""
    from transformers import Phi3Config, Phi3ForCausalLM

    half = SHAPE["hidden_size"] // SHAPE["num_attention_heads"] // 2
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * half,
        "long_factor": [8.0] * half,
        "original_max_position_embeddings": TRAINED_AT,
    }
    config = SHAPE | {
        "rope_parameters": rope,
        "original_max_position_embeddings": TRAINED_AT,
    }
    return save(directory, 0, lambda: Phi3ForCausalLM(Phi3Config(**config)))


def llama4(directory: Path) -> Path:
    """A Llama 4 whose first layer has no RoPE: there its attention has a temperature, if it is
    tuned. With the default of `floor_scale` that begins at 8192 tokens."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    config = SHAPE | {
        "intermediate_size_mlp": SHAPE["intermediate_size"],
        "head_dim": 32,
        "no_rope_layers": [0, 1],
        "moe_layers": [],
        "interleave_moe_layer_step": 0,
        "floor_scale": 16,
        "max_position_embeddings": 1 << 16,
        "use_qk_norm": False,
    }
    return save(directory, 0, lambda: Llama4ForCausalLM(Llama4TextConfig(**config)))


CODE = """
from transformers import LlamaForCausalLM, LlamaModel


class TinyModel(LlamaModel):
    def forward(self, input_ids=None, position_ids=None, inputs_embeds=None, **others):
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        return super().forward(position_ids=position_ids, inputs_embeds=inputs_embeds, **others)


class TinyForCausalLM(LlamaForCausalLM):
    pass
"""


def with_code(directory: Path) -> Path:
    """A Llama with Python code of its own, which does what transformers' does."""
    names = {"AutoModel": "TinyModel", "AutoModelForCausalLM": "TinyForCausalLM"}
    code = {key: f"{CODE_FILE.removesuffix('.py')}.{name}" for key, name in names.items()}
    file = llama(directory) / "config.json"
    config = {"architectures": ["TinyForCausalLM"], "auto_map": code}
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    (directory / CODE_FILE).write_text(CODE)
    return directory


def qwen3_next(directory: Path) -> Path:
    """A Qwen3-Next: two layers of gated delta nets, whose state is one a block, and two of
    attention, with experts."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = SHAPE | {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "head_dim": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    }
    return save(directory, 0, lambda: Qwen3NextForCausalLM(Qwen3NextConfig(**config)))


def images(directory: Path) -> Path:
    """A Qwen2-VL, which reads an image as more tokens or fewer."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration, Qwen2VLImageProcessor

    text = SHAPE | {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 6, 6],
        },
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END,
    }
    vision = {
        "depth": 1,
        "embed_dim": 64,
        "hidden_size": SHAPE["hidden_size"],
        "num_heads": 2,
        "mlp_ratio": 2,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
        "initializer_range": 0.3,
    }
    ids = {
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END,
    }
    config = Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)
    save(directory, 0, lambda: Qwen2VLForConditionalGeneration(config))
    Qwen2VLImageProcessor().save_pretrained(directory)
    return directory


def adapter(directory: Path, *, seed: int = 0) -> Path:
    """A LoRA adapter for the Llama, of its attention's projections."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    hidden = SHAPE["hidden_size"]
    kv = hidden // SHAPE["num_attention_heads"] * SHAPE["num_key_value_heads"]
    modules = {"q_proj": hidden, "k_proj": kv, "v_proj": kv, "o_proj": hidden}
    tensors = {}
    for layer in range(SHAPE["num_hidden_layers"]):
        for name, out in modules.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(8, hidden, generator=generator) * 0.3
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(out, 8, generator=generator) * 0.3
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": list(modules),
        "bias": "none",
        "base_model_name_or_path": "",
        "task_type": "CAUSAL_LM",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def changed(directory: Path, of: Path, **config: Any) -> Path:
    """A copy of a model whose configuration says something else."""
    shutil.copytree(of, directory)
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return directory


def with_projections(directory: Path, model: Path) -> Path:
    """The model with other linear layers: on a CPU vLLM packs those where nobody can read them."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if "_proj." in name:
            tensors[name] = tensor.flip(0).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


def with_row(directory: Path, of: Path, token: int) -> Path:
    """A copy whose embedding of one token is another one; size and header stay."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(of, directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][token] *= -1
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


def save(directory: Path, seed: int, make: Any) -> Path:
    """Weights of this seed, and a tokenizer."""
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import Qwen2TokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    make().to(torch.float32).save_pretrained(directory)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(["to be or not to be"], vocab_size=270, show_progress=False)
    tokenizer.save_model(str(directory))
    names = ["<|endoftext|>", "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"]
    fast = Qwen2TokenizerFast.from_pretrained(directory)
    fast.add_special_tokens({"additional_special_tokens": [*names, "<|video_pad|>"]})
    fast.save_pretrained(directory)
    return directory
