"""Ways in which what an engine computes can change, and ways that change nothing.

What has no case, because vLLM 0.32 does not run it on a CPU, or because it changes nothing there:

* Quantization while weights are loaded, by another method than `fp8_per_channel`: `fp8`, `mxfp8`
  and INT8 experts have no kernels, FP8 by block needs AMX, and `int8_per_channel_weight_only` and
  `nvfp4_per_token` leave the linear layers as they are.
* An environment variable that changes KV by more than the last bits.
  `VLLM_MOE_ROUTING_SIMULATION_STRATEGY` ends in an error of the experts' kernel.
  `VLLM_FLOAT32_MATMUL_PRECISION`, `VLLM_USE_HW_AGNOSTIC`, `ONEDNN_DEFAULT_FPMATH_MODE` and, without
  AMX, `VLLM_DISABLED_KERNELS` change no answer; `VLLM_CPU_INT4_W4A8` needs AMX. So the case has a
  variable of the order of sums.
* Another image under an id that a request gave before: such ids are trusted, and it is served.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from identity import heads, models
from identity.engines import Engine, Prompt

OPTIONS = "kvdepot.vllm.options"
NAMESPACE = "kvdepot.vllm.namespace"
BESIDE = "kvdepot.vllm.beside"


def tokens(count: int = 200, seed: int = 1) -> list[int]:
    """A random prompt."""
    chosen = random.Random(seed)
    return [chosen.randrange(10, 250) for _ in range(count)]


TEXT = (Prompt(tokens()),)
Holes = Sequence[tuple[str, str, Any]]


@dataclass(frozen=True)
class Case:
    """Two engines: what the first stores, the second must not be served, or must."""

    name: str
    make: Callable[[Path], tuple[Engine, Engine]]
    """The engines, over models that are made in a directory."""
    holes: Holes = ()
    """What has to be taken out of kvdepot's names, or of vLLM's hashes, so that stale KV is served.
    Without any, the case changes nothing: the second engine must be served."""
    prompts: Callable[[Path], Sequence[Prompt]] = lambda _: TEXT
    asked: Callable[[Path], Sequence[Prompt]] | None = None
    """What the second engine is asked, if that is something else."""
    meanwhile: Callable[[Path], None] = lambda _: None
    """Done between the two engines."""
    settings: dict[str, Any] = field(default_factory=dict)
    """kvdepot's own."""
    asked_settings: dict[str, Any] | None = None
    """The second engine's, if they are others."""
    unservable: str = ""
    """Why stale KV cannot be served whatever is taken out of the names, so that there is no
    control."""
    no_token: bool = False
    """Whether the second engine must not be served anything: what it would be served is right, or
    right but for the last bits."""
    chunk_tokens: int = 32
    """Tokens of a chunk of LMCache's: the blocks of both engines have to fit into one."""
    needs: Callable[[], str] = lambda: ""
    """What the case needs and this machine does not have; nothing if it runs."""

    @property
    def harmless(self) -> bool:
        """Whether nothing changes that counts."""
        return not self.holes and not self.unservable


def _llamas(**changes: Any) -> Callable[[Path], tuple[Engine, Engine]]:
    """One model, two engines, the second with other options of vLLM."""

    def make(at: Path) -> tuple[Engine, Engine]:
        first = Engine(str(models.llama(at / "llama")))
        return first, replace(first, **changes)

    return make


def _weights(at: Path) -> tuple[Engine, Engine]:
    return Engine(str(models.llama(at / "one"))), Engine(str(models.llama(at / "two", seed=1)))


def _row(at: Path) -> tuple[Engine, Engine]:
    one = models.llama(at / "one")
    return Engine(str(one)), Engine(str(models.with_row(at / "two", one, TEXT[0].tokens[3])))


LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}


def _rope(at: Path) -> tuple[Engine, Engine]:
    one = models.llama(at / "one")
    return Engine(str(one)), Engine(str(models.changed(at / "two", one, rope_parameters=LINEAR)))


def _longrope(one: int, two: int) -> Callable[[Path], tuple[Engine, Engine]]:
    def make(at: Path) -> tuple[Engine, Engine]:
        first = Engine(str(models.longrope(at / "phi3")), {"max_model_len": one})
        return first, replace(first, options={"max_model_len": two})

    return make


def _dtypes(at: Path) -> tuple[Engine, Engine]:
    model = str(models.llama(at / "llama"))
    return Engine(model, {"dtype": "bfloat16"}), Engine(model, {"dtype": "float16"})


LORA = {"enable_lora": True, "max_lora_rank": 8}


def _kv_dtypes(at: Path) -> tuple[Engine, Engine]:
    """Of the same size: one of another size cannot be read at all."""
    model = str(models.llama(at / "llama"))
    first, second = ({"kv_cache_dtype": dtype} for dtype in ("fp8_e4m3", "fp8_e5m2"))
    return Engine(model, first), Engine(model, second)


def _no_avx512() -> str:
    """vLLM's condition for an FP8 KV cache on a CPU."""
    import torch

    has = torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()
    return "" if has else "AVX-512 or AMX"


def _quantized(at: Path) -> tuple[Engine, Engine]:
    """Of vLLM's methods that need no prepared weights, the one that needs no AMX."""
    first = Engine(str(models.llama(at / "llama")), {"dtype": "bfloat16"})
    return first, replace(first, options=first.options | {"quantization": "fp8_per_channel"})


def _ranks(at: Path) -> tuple[Engine, Engine]:
    # vLLM binds each rank to a NUMA node of its own otherwise.
    first = Engine(
        str(models.llama(at / "llama")), environment={"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    )
    return first, replace(first, options={"tensor_parallel_size": 2})


def _drafting(draft: Path) -> dict[str, Any]:
    return {
        "speculative_config": {
            "method": "draft_model",
            "model": str(draft),
            "num_speculative_tokens": 3,
        },
        "per_request_spec_decode_metrics": "summary",
    }


def _drafts(at: Path) -> tuple[Engine, Engine]:
    """The second engine's draft model is its target, so that all its drafts are accepted."""
    target, other = models.llama(at / "target"), models.llama(at / "other", seed=1)
    return Engine(str(target), _drafting(other)), Engine(str(target), _drafting(target))


def _draft(at: Path) -> tuple[Engine, Engine]:
    target = models.llama(at / "target")
    engine = Engine(str(target), _drafting(target))
    return engine, engine


def _head(
    method: str, head: Callable[..., Path], second: int = 0
) -> Callable[[Path], tuple[Engine, Engine]]:
    """Two engines with heads that draft for their target; `second` is the seed of the second
    one's weights, the first one's is 0."""

    def make(at: Path) -> tuple[Engine, Engine]:
        target = str(heads.target(at / "target"))
        one, two = (str(head(at / f"head{seed}", seed=seed)) for seed in (0, second))
        return _predicting(target, method, model=one), _predicting(target, method, model=two)

    return make


def _layer(make: Callable[[Path], Path], **options: Any) -> Callable[[Path], tuple[Engine, Engine]]:
    """Two engines of a model with a layer of its own that drafts (MTP)."""

    def both(at: Path) -> tuple[Engine, Engine]:
        engine = _predicting(str(make(at / "model")), "mtp", options)
        return engine, engine

    return both


def _predicting(
    target: str, method: str, options: dict[str, Any] | None = None, **config: Any
) -> Engine:
    drafting = {
        "speculative_config": {"method": method, "num_speculative_tokens": 3, **config},
        "per_request_spec_decode_metrics": "summary",
    }
    return Engine(target, {**(options or {}), **drafting}, output_tokens=12)


def _embeddings(at: Path) -> tuple[Engine, Engine]:
    """Not normalized, so that they differ by more than the tolerance if a block is wrong."""
    pooler = {"seq_pooling_type": "LAST", "use_activation": False}
    options = {"runner": "pooling", "convert": "embed", "pooler_config": pooler}
    engine = Engine(str(models.llama(at / "llama")), options, pooling="embed")
    return engine, engine


def _llama4(**changes: Any) -> Callable[[Path], tuple[Engine, Engine]]:
    def make(at: Path) -> tuple[Engine, Engine]:
        first = Engine(str(models.llama4(at / "llama4")))
        return first, replace(first, **changes)

    return make


def _fitted(at: Path) -> tuple[Engine, Engine]:
    """The first engine makes of -1 a length that has no temperature, once its model has one."""
    _, second = _llama4()(at)
    return replace(second, options={"max_model_len": -1, "num_gpu_blocks_override": 500}), second


def _tuned(at: Path) -> None:
    tuned = {"attn_temperature_tuning": True}
    (at / "llama4/generation_config.json").write_text(json.dumps(tuned))


def _code(at: Path) -> tuple[Engine, Engine]:
    engine = Engine(str(models.with_code(at / "code")), {"trust_remote_code": True})
    return engine, engine


def _other_code(at: Path) -> None:
    file = at / "code" / models.CODE_FILE
    file.write_text(models.CODE.replace("(input_ids)", "(input_ids).flip(-1)"))


def _adapters(at: Path) -> tuple[Engine, Engine]:
    models.adapter(at / "adapter")
    models.adapter(at / "other", seed=1)
    return _llamas(options=LORA)(at)[1], _llamas(options=LORA)(at)[1]


def _adapter_modules(at: Path) -> tuple[Engine, Engine]:
    first, second = _adapters(at)
    return first, replace(second, options=LORA | {"lora_target_modules": ["o_proj"]})


def _under_adapter(at: Path) -> Sequence[Prompt]:
    return (Prompt(tokens(), adapter=str(at / "adapter")),)


def _other_adapter(at: Path) -> None:
    shutil.copy(at / "other/adapter_model.safetensors", at / "adapter")


def _images(at: Path) -> tuple[Engine, Engine]:
    model = str(models.images(at / "images"))
    first, second = ({"mm_processor_kwargs": {"max_pixels": pixels}} for pixels in (112896, 50176))
    return Engine(model, first), Engine(model, second)


def _processor(at: Path) -> tuple[Engine, Engine]:
    one = Engine(str(models.images(at / "images")))
    return one, one


def _other_processor(at: Path) -> None:
    _other_mean(at / "images/preprocessor_config.json")


def _other_mean(file: Path) -> None:
    text = file.read_text()
    changed = text.replace("0.48145466", "0.1").replace("0.26862954", "0.9")
    assert changed != text
    file.write_text(changed)


def _processor_replaced_while_loading(at: Path) -> tuple[Engine, Engine]:
    """The first engine reads images by the old file, and sees the new one."""
    served = models.images(at / "served")
    file = served / "preprocessor_config.json"
    _other_mean(new := shutil.copy(file, at / "new.json"))
    return Engine(str(served), before_model=[(str(file), str(new))]), Engine(str(served))


def _about(image: int, image_id: str | None = None) -> Callable[[Path], Sequence[Prompt]]:
    start, pad, end = models.VISION_START, models.IMAGE, models.VISION_END
    prompt = [*tokens(70), start, pad, end, *tokens(90, seed=2)]
    return lambda _: (Prompt(prompt, image=image, image_id=image_id),)


_image = _about(1)


def _salted(salt: str) -> Callable[[Path], Sequence[Prompt]]:
    return lambda _: (Prompt(tokens(), salt=salt),)


def _rewritten(at: Path) -> None:
    """Other weights into the same file, with its old time."""
    other = models.llama(at / "other", seed=1) / "model.safetensors"
    file = at / "llama/model.safetensors"
    times = file.stat()
    file.write_bytes(other.read_bytes())
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def _replaced_while_loading(at: Path) -> tuple[Engine, Engine]:
    """The first engine computes with the old weights, and sees the files of the new ones."""
    old, new = models.llama(at / "old"), models.llama(at / "new", seed=1)
    served = shutil.copytree(old, at / "served")
    file = "model.safetensors"
    first = Engine(str(served), before_model=[(str(served / file), str(new / file))])
    return first, Engine(str(served))


def _reloads(*numbers: int) -> Callable[[Path], tuple[Engine, Engine]]:
    """Both engines start with the same files; each loads the weights of its number afterwards."""

    def make(at: Path) -> tuple[Engine, Engine]:
        one = models.llama(at / "one")
        paths = [str(one), str(models.with_projections(at / "two", one))]
        reloads = [[("reload_weights", {"weights_path": paths[number]})] for number in numbers]
        first, second = (Engine(paths[0], calls=reload) for reload in reloads)
        return first, second

    return make


def _elsewhere(at: Path) -> tuple[Engine, Engine]:
    one = models.llama(at / "one")
    return Engine(str(one)), Engine(str(shutil.copytree(one, at / "elsewhere" / "by another name")))


def _tokenizer(at: Path) -> tuple[Engine, Engine]:
    one = models.llama(at / "one")
    two = shutil.copytree(one, at / "two")
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json"):
        with (two / name).open("a") as file:
            file.write("\n")
    (two / "chat_template.jinja").write_text("{{ messages }}")
    (two / "README.md").write_text("read me")
    return Engine(str(one)), Engine(str(two))


def _other_tokenizer(at: Path) -> tuple[Engine, Engine]:
    first, other = _tokenizer(at)
    return first, replace(first, options={"tokenizer": other.model})


def _more_adapters(at: Path) -> tuple[Engine, Engine]:
    first = Engine(str(models.llama(at / "llama")), LORA)
    return first, replace(first, options=LORA | {"max_loras": 2, "max_cpu_loras": 4})


WEIGHTS: Holes = [(NAMESPACE, "weights", "w")]
MEMORY: Holes = [
    ("kvdepot.vllm.memory_weights.MemoryWeights", name, None)
    for name in ("suspect", "_begin_sample")
]
MODEL: Holes = [(OPTIONS, "_of_model", "m")]
# vLLM's: salts, images and adapters in its hash of a block.
HASHED: Holes = [("vllm.v1.core.kv_cache_utils", "generate_block_hash_extra_keys", (None, 0))]

CHANGES = (
    Case("weights", _weights, WEIGHTS),
    Case("one row of weights, sampled", _row, WEIGHTS),
    Case("one row of weights, full", _row, WEIGHTS, settings={"weights": "full"}),
    Case(
        "a file rewritten in place, its time kept",
        _llamas(),
        WEIGHTS,
        meanwhile=_rewritten,
        settings={"weights": "full"},
    ),
    Case(
        "a file replaced between load and fingerprint",
        _replaced_while_loading,
        [("kvdepot.engine.weights", "changed_since", None)],
    ),
    Case("weights reloaded in memory", _reloads(0, 1), MEMORY),
    Case("weights reloaded in memory before they were stored", _reloads(1, 0), MEMORY),
    Case("RoPE in config.json", _rope, MODEL),
    Case(
        "--hf-overrides",
        _llamas(options={"hf_overrides": {"rope_parameters": LINEAR}}),
        MODEL,
    ),
    Case("length under LongRoPE", _longrope(512, 1024), [(OPTIONS, "length_of", None)]),
    Case(
        "dtype",
        _dtypes,
        [
            (NAMESPACE, "layout_of_group", "l"),
            (NAMESPACE, "_dtype", "d"),
            (OPTIONS, "_KINDS", {"model_config.dtype": "harmless"}),
        ],
    ),
    Case(
        "KV cache dtype",
        _kv_dtypes,
        [
            (NAMESPACE, "layout_of_group", "l"),
            (NAMESPACE, "_dtype", "d"),
            (OPTIONS, "_KINDS", {"cache_config.cache_dtype": "harmless"}),
        ],
        needs=_no_avx512,
    ),
    Case(
        "quantization",
        _quantized,
        # It is many options once vLLM has resolved it.
        [(OPTIONS, "kind_of", "harmless")],
    ),
    Case("tensor parallelism", _ranks, unservable="a rank's part of a block has another size"),
    Case(
        "block size",
        _llamas(options={"block_size": 64}),
        unservable="vLLM hashes blocks of other tokens",
        chunk_tokens=64,
    ),
    Case("weights of a draft model", _drafts, WEIGHTS),
    Case("weights of an EAGLE head", _head("eagle", heads.eagle, second=1), WEIGHTS),
    Case("remote code", _code, WEIGHTS, meanwhile=_other_code),
    Case(
        "length under Llama 4",
        _llama4(options={"max_model_len": 40000}),
        [(OPTIONS, "length_of", None)],
    ),
    Case("length under Llama 4 that fits the memory", _fitted, [(OPTIONS, "length_of", None)]),
    Case(
        "generation_config.json of Llama 4",
        _llama4(),
        [(OPTIONS, "length_of", None)],
        meanwhile=_tuned,
    ),
    Case(
        "an environment variable",
        _llamas(environment={"VLLM_CPU_ATTN_SPLIT_KV": "0"}),
        [(OPTIONS, "variables", ())],
        no_token=True,
    ),
    Case(
        "the setting `salt`",
        _llamas(),
        [(NAMESPACE, "with_epoch", None)],
        settings={"salt": "one"},
        asked_settings={"salt": "two"},
        no_token=True,
    ),
    Case(
        "a request's cache_salt",
        _llamas(),
        HASHED,
        prompts=_salted("one"),
        asked=_salted("two"),
        no_token=True,
    ),
    Case(
        "LoRA files",
        _adapters,
        [("kvdepot.vllm.adapters.AdapterFingerprints", "of", "a")],
        prompts=_under_adapter,
        meanwhile=_other_adapter,
    ),
    Case(
        "LoRA modules",
        _adapter_modules,
        [(OPTIONS, "_KINDS", {"lora_config.target_modules": "harmless"})],
        prompts=_under_adapter,
    ),
    Case(
        "processor options",
        _images,
        [(OPTIONS, "_KINDS", {"model_config.multimodal_config.mm_processor_kwargs": "harmless"})],
        prompts=_image,
    ),
    Case(
        "processor files",
        _processor,
        [(NAMESPACE, "processor", "p")],
        prompts=_image,
        meanwhile=_other_processor,
    ),
    Case(
        "a processor file replaced between load and fingerprint",
        _processor_replaced_while_loading,
        [("kvdepot.engine.weights", "changed_since", None)],
        prompts=_image,
    ),
    # The text before it is served.
    Case("another image", _processor, HASHED, prompts=_about(1), asked=_about(2)),
    Case(
        "another image by the request's own id",
        _processor,
        HASHED,
        prompts=_about(1, "one"),
        asked=_about(2, "two"),
    ),
)


def _alike(
    make: Callable[[Path], Path] = models.llama, **options: Any
) -> Callable[[Path], tuple[Engine, Engine]]:
    """Two engines that are configured alike."""

    def both(at: Path) -> tuple[Engine, Engine]:
        engine = Engine(str(make(at / "model")), options)
        return engine, engine

    return both


def _ladder(_: Path) -> Sequence[Prompt]:
    """A prompt of every length from one block to the next."""
    return [Prompt(tokens(150 + count, seed=count)) for count in range(33)]


def _block_ends(_: Path) -> Sequence[Prompt]:
    """Prompts that end around the end of a block, and inside one."""
    return [Prompt(tokens(count, seed=count)) for count in (150, 159, 160, 161, 175)]


# What vLLM makes of a block of this hybrid, whose state is as large as so many tokens.
HYBRID_BLOCK = 1056


def _around_blocks(_: Path) -> Sequence[Prompt]:
    """Prompts that end around the end of a block, and inside one."""
    ends = (1, 2, 3, 44, 500, HYBRID_BLOCK - 1, HYBRID_BLOCK, HYBRID_BLOCK + 1, 1500)
    return [Prompt(tokens(HYBRID_BLOCK + end, seed=end)) for end in ends]


N_GRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}

# Features of the engine: the second engine is served what the first has stored, and answers alike.
FEATURES = (
    Case("speculative decoding by n-grams", _alike(speculative_config=N_GRAM), prompts=_ladder),
    Case("speculative decoding by a draft model", _draft, prompts=_ladder),
    Case("speculative decoding by EAGLE", _head("eagle", heads.eagle), prompts=_block_ends),
    Case("speculative decoding by EAGLE-3", _head("eagle3", heads.eagle3), prompts=_block_ends),
    Case("speculative decoding by an MTP layer", _layer(heads.mtp), prompts=_block_ends),
    Case("embeddings, of a prompt's last token", _embeddings, prompts=_ladder),
    Case("priority scheduling", _alike(scheduling_policy="priority")),
    Case(
        "a hybrid of attention and gated delta nets",
        _alike(models.qwen3_next, dtype="bfloat16", max_model_len=4096),
        prompts=_around_blocks,
    ),
    Case("every length of a prompt", _alike(), prompts=_ladder),
)

HARMLESS = (
    Case("nothing", _llamas()),
    Case("the same files elsewhere", _elsewhere),
    Case("tokenizer, chat template and README", _tokenizer),
    Case("--max-num-seqs", _llamas(options={"max_num_seqs": 2})),
    Case("--max-num-batched-tokens", _llamas(options={"max_num_batched_tokens": 2048})),
    Case("--max-model-len", _llamas(options={"max_model_len": 2048})),
    Case("length under LongRoPE, on the same side", _longrope(256, 500)),
    Case("--seed", _llamas(options={"seed": 7})),
    Case("--served-model-name", _llamas(options={"served_model_name": "another"})),
    Case("--generation-config", _llamas(options={"generation_config": "vllm"})),
    Case("--tokenizer", _other_tokenizer),
    Case("--enable-lora, for prompts without an adapter", _llamas(options=LORA)),
    Case("--max-loras, for prompts without an adapter", _more_adapters),
    Case("--gpu-memory-utilization", _llamas(options={"gpu_memory_utilization": 0.3})),
    Case("--scheduling-policy", _llamas(options={"scheduling_policy": "priority"})),
    Case(
        "--no-enforce-eager -O0",
        _llamas(options={"enforce_eager": False, "optimization_level": 0}),
    ),
    Case("--hf-token", _llamas(options={"hf_token": "hf_of_this_test"})),
    Case(
        "kv_role",
        _llamas(),
        settings={"kv_role": "kv_producer"},
        asked_settings={"kv_role": "kv_consumer"},
    ),
    Case("VLLM_CPU_KVCACHE_SPACE", _llamas(environment={"VLLM_CPU_KVCACHE_SPACE": "2"})),
    Case("VLLM_LOGGING_LEVEL", _llamas(environment={"VLLM_LOGGING_LEVEL": "ERROR"})),
    Case("the executor", _llamas(options={"distributed_executor_backend": "mp"})),
    Case("an image", _processor, prompts=_image),
    Case(
        "text before an image, other processor options",
        _images,
        prompts=lambda _: (Prompt(tokens(170)),),
    ),
)
