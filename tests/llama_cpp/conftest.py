"""Models with random weights, made once a run, and Llamas of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

REASON = "llama-cpp-python is not installed: see `make llama`"


@pytest.fixture(scope="session")
def model_files(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The GGUF file of a kind of model: llama, gemma, mamba or jamba; seed 2 has other weights of
    the same shape."""
    pytest.importorskip("llama_cpp", reason=REASON)
    pytest.importorskip("gguf", reason=REASON)
    import llama_models

    folder = tmp_path_factory.mktemp("gguf")

    def file_of(kind: str, seed: int = 1) -> Path:
        path = folder / f"{kind}-{seed}.gguf"
        return path if path.exists() else getattr(llama_models, kind)(path, seed)

    return file_of


@pytest.fixture
def make_llama(model_files: Callable[..., Path]) -> Iterator[Callable[..., Any]]:
    """A Llama of a kind of model; closed when the test ends."""
    import llama_cpp
    from llama_child import SETTINGS

    made = []

    def make(kind: str = "llama", seed: int = 1, **settings: Any) -> Any:
        made.append(llama_cpp.Llama(str(model_files(kind, seed)), **SETTINGS | settings))
        return made[-1]

    yield make
    for llama in made:
        llama.close()


@pytest.fixture(scope="session")
def server_model(model_files: Callable[..., Path]) -> Path:
    """What the servers under test serve."""
    return model_files("llama")
