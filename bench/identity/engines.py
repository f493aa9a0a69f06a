"""vLLM engines, one after the other: each in a process that is forked off one which has imported
vLLM, so that a start takes seconds.

Run as a program, this is that process: it reads one JSON object a line, forks, and prints what the
engine answered as one line.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

OUTPUT_TOKENS = 6
# Engines that are equal differ by less, whatever was served from where.
TOLERANCE = 2e-3
ENGINE_SECONDS = 600


@dataclass(frozen=True)
class Prompt:
    """What is asked."""

    tokens: list[int]
    image: int | None = None
    """Number of the image that stands in the prompt."""
    image_id: str | None = None
    """The id that the request itself gives the image, which vLLM then hashes no more."""
    adapter: str | None = None
    """Path of the LoRA adapter that it runs under."""
    salt: str | None = None


@dataclass(frozen=True)
class Engine:
    """How an engine is configured."""

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    """Of vLLM, beside those that all engines have."""
    environment: dict[str, str] = field(default_factory=dict)
    connector: dict[str, Any] | None = None
    """The whole of `--kv-transfer-config`."""
    holes: Sequence[tuple[str, str, Any]] = ()
    """(module, name, constant): functions of the connector that are made to answer the same
    always, so that something enters no name."""
    before_model: Sequence[tuple[str, str]] = ()
    """(file, source): files that are replaced while the model is loaded, after it was read."""
    calls: Sequence[tuple[str, dict[str, Any]]] = ()
    """Methods of the workers that are called before anything is asked, with their arguments."""
    output_tokens: int = OUTPUT_TOKENS
    together: bool = False
    """Whether all prompts are asked at once."""
    pooling: str | None = None
    """The task of a pooling model, such as `embed`, instead of generating."""


@dataclass(frozen=True)
class Answer:
    """Of one prompt."""

    tokens: list[int]
    logprobs: list[float]
    """Of the tokens; what a pooling model returns instead, which has no tokens."""
    cached: int
    """Tokens that were served and not computed."""
    accepted: int = 0
    """Tokens of a draft that were accepted, where the engine counts them."""

    def differs(self, other: Answer) -> bool:
        """Whether the engines did not compute the same."""
        # Stale KV of a draft model changes no answer: its drafts are accepted less often.
        if (self.tokens, self.accepted) != (other.tokens, other.accepted):
            return True
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return any(abs(one - two) > TOLERANCE for one, two in pairs)


@dataclass
class Probed:
    """What an engine's probes found."""

    differences: list[float] = field(default_factory=list)
    """The largest relative difference of each compared block."""
    results: dict[str, int] = field(default_factory=dict)
    """Blocks by what came of them."""


class Engines:
    """The process that engines are forked off; it ends with the block."""

    def __init__(self, python: Sequence[str] = (sys.executable,), **variables: str) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="identity")
        self.log = Path(self._directory.name) / "log"
        self.probed = Probed()
        """Of the engine that was asked last."""
        environment = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "TOKENIZERS_PARALLELISM": "false",
            # Where transformers copies code that comes with a model.
            "HF_MODULES_CACHE": str(Path(self._directory.name) / "modules"),
            **os.environ,
            **variables,
        }
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [*python, "-m", "identity.engines"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                cwd=Path(__file__).parents[1],
            )

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._directory.cleanup()

    def ask(self, engine: Engine, prompts: Sequence[Prompt]) -> list[Answer]:
        """Start it, ask, and end it. Raises RuntimeError with what it said if it does not work."""
        assert self._process.stdin
        assert self._process.stdout
        json.dump([asdict(engine), [asdict(prompt) for prompt in prompts]], self._process.stdin)
        print(file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"no engine can be started: {self.log.read_text()[-2000:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        self.probed = Probed(**answer["probed"])
        return [Answer(**one) for one in answer["answers"]]


def main() -> None:
    """The process that engines are forked off."""
    for module in ("vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker"):
        importlib.import_module(module)
    look_at_models_here()
    # What was imported is no garbage, for which each engine looks several times, and at its end.
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None
    # What an engine prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        engine, prompts = json.loads(line)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            try:
                probed = Probed()
                found: dict[str, Any] = {"answers": _serve(engine, prompts, probed)}
                found["probed"] = asdict(probed)
            except BaseException as error:
                traceback.print_exc()
                found = {"error": f"{type(error).__name__}: {error}"}
            with os.fdopen(writing, "w") as pipe:
                json.dump(found, pipe)
            sys.stderr.flush()
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            text = pipe.read()
        os.waitpid(child, 0)
        print(text or '{"error": "the engine died"}', file=answers, flush=True)


def look_at_models_here() -> Callable[[], None]:
    """vLLM asks a new process about each class of models that it has not met, so that nothing of
    CUDA is in its own: half a minute. An engine that is forked imports the class anyway.

    What it returns has vLLM do so again.
    """
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    ask, registry._run_in_subprocess = registry._run_in_subprocess, lambda look: look()
    return lambda: setattr(registry, "_run_in_subprocess", ask)


def configured(arguments: Any) -> Any:
    """vLLM's configuration for an engine's arguments, made without such a process."""
    undo = look_at_models_here()
    try:
        return arguments.create_engine_config()
    finally:
        undo()


def _serve(
    engine: dict[str, Any], prompts: list[dict[str, Any]], probed: Probed
) -> list[dict[str, Any]]:
    from vllm import LLM, SamplingParams

    os.environ.update(engine["environment"])
    for module, name, constant in engine["holes"]:
        _hole(module, name, constant)
    _replace_while_loading(engine["before_model"])
    chosen: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": 32,
        "max_model_len": 1024,
        "max_num_seqs": 4,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
    }
    if engine["connector"]:
        chosen["kv_transfer_config"] = engine["connector"]
        if engine["connector"]["kv_connector"] == "KvdepotConnector":
            note_probes(probed)
        else:
            _register_kernels()
    llm = LLM(model=engine["model"], **(chosen | engine["options"]))
    if engine["pooling"]:
        return _pool(llm, engine, prompts)
    sampling = SamplingParams(
        temperature=0,
        max_tokens=engine["output_tokens"],
        min_tokens=engine["output_tokens"],
        logprobs=0,
    )
    for method, arguments in engine["calls"]:
        llm.collective_rpc(method, kwargs=arguments)
    answers = []
    batches = [prompts] if engine["together"] else [[prompt] for prompt in prompts]
    outputs = itertools.chain.from_iterable(
        llm.generate(
            [_prompt(prompt) for prompt in batch],
            sampling,
            lora_request=_adapter(batch[0]),
            use_tqdm=False,
        )
        for batch in batches
    )
    for output in outputs:
        (said,) = output.outputs
        answers.append(
            {
                "tokens": list(said.token_ids),
                "logprobs": [
                    one[token].logprob
                    for token, one in zip(said.token_ids, said.logprobs, strict=True)
                ],
                "cached": output.num_cached_tokens or 0,
                "accepted": _accepted(said.spec_decode_metrics),
            }
        )
    if engine["connector"]:
        # Stores end in later steps.
        for number in range(3):
            llm.generate([{"prompt_token_ids": [5 + number] * 3}], sampling, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    return answers


def _pool(llm: Any, engine: dict[str, Any], prompts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def encode(prompt: dict[str, Any]) -> Any:
        (output,) = llm.encode([prompt], pooling_task=engine["pooling"], use_tqdm=False)
        return output

    answers = []
    for prompt in prompts:
        output = encode(_prompt(prompt))
        pooled = output.outputs.data.flatten().tolist()
        answers.append({"tokens": [], "logprobs": pooled, "cached": output.num_cached_tokens})
    if engine["connector"]:
        for number in range(3):
            encode({"prompt_token_ids": [5 + number] * 3})
    llm.llm_engine.engine_core.shutdown()
    return answers


def note_probes(probed: Probed) -> None:
    """Note what the connector's probes find."""
    from kvdepot.vllm.metrics import Collector

    count, differs = Collector.probed, Collector.differs

    def counted(self: Any, result: str, blocks: int) -> None:
        probed.results[result] = probed.results.get(result, 0) + blocks
        count(self, result, blocks)

    def noted(self: Any, difference: float) -> None:
        probed.differences.append(difference)
        differs(self, difference)

    Collector.probed, Collector.differs = counted, noted


def _register_kernels() -> None:
    """vLLM looks for its kernels in all modules, and fails at one that LMCache imports."""
    from vllm.platforms import current_platform

    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda _: None)


def _accepted(drafts: Any) -> int:
    """`drafts` are vLLM's counts of a request, None unless it is told to count."""
    return 0 if drafts is None else sum(n * times for n, times in enumerate(drafts.histogram))


def _hole(module: str, name: str, constant: Any) -> None:
    """From now on the function answers the same always; a dictionary is changed instead."""
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError:
        # A class of it.
        outer, _, inner = module.rpartition(".")
        found = getattr(importlib.import_module(outer), inner)
    now = getattr(found, name)
    if isinstance(now, dict):
        now.update(constant)
    else:
        setattr(found, name, lambda *_, **__: constant)


def _replace_while_loading(files: list[tuple[str, str]]) -> None:
    """Replace files as soon as the model is loaded, before any connector sees them."""
    if not files:
        return
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    load = CPUModelRunner.load_model

    def load_and_replace(self: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = load(self, *args, **kwargs)
        for file, source in files:
            beside = f"{file}.new"
            Path(beside).write_bytes(Path(source).read_bytes())
            os.replace(beside, file)
        return loaded

    CPUModelRunner.load_model = load_and_replace


def _prompt(prompt: dict[str, Any]) -> Any:
    made: dict[str, Any] = {"prompt_token_ids": prompt["tokens"]}
    if prompt["salt"] is not None:
        made["cache_salt"] = prompt["salt"]
    if prompt["image"] is not None:
        import numpy
        from PIL import Image

        random = numpy.random.default_rng(prompt["image"])
        pixels = random.integers(0, 255, (336, 336, 3), dtype=numpy.uint8)
        made["multi_modal_data"] = {"image": Image.fromarray(pixels)}
    if prompt["image_id"] is not None:
        made["multi_modal_uuids"] = {"image": [prompt["image_id"]]}
    return made


def _adapter(prompt: dict[str, Any]) -> Any:
    if prompt["adapter"] is None:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest("adapter", 1, prompt["adapter"])


if __name__ == "__main__":
    main()
