"""What a model's keys and values depend on beside the tokens.

The weights are in memory, so all of their bytes are hashed, once; `weights` names them instead.
Adapters that can be switched while the model lives (PEFT's layers) are looked at on every call,
and so are the tensors: torch counts changes in place, most of them, and a few values of each are
compared.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import torch

from kvdepot.engine import tensors as engine_tensors
from kvdepot.engine import weights as engine_weights
from kvdepot.transformers.refusal import refused

# What is the same model under another name or version; dtype and class have fields of their own.
NOT_OF_THE_NUMBERS = ("_name_or_path", "architectures", "dtype", "transformers_version")
# Frequencies that depend on the length of the whole sequence: the beginning of a longer prompt
# would have other keys than it has alone.
ROPE_OF_LENGTH = ("dynamic", "longrope")


def check_model(model: Any) -> None:
    """Refuse models whose state at a token depends on more than the tokens before it."""
    if model.config.is_encoder_decoder:
        raise refused("model.config.is_encoder_decoder", True, "False")
    devices = sorted({str(one.device) for one in model.parameters()})
    if len(devices) != 1 or devices == ["meta"]:
        raise refused("model's devices", ", ".join(devices), "one device that holds all parameters")
    for rope in _rope_types(model.config.get_text_config(decoder=True).to_dict()):
        if rope in ROPE_OF_LENGTH:
            raise refused("rope_type", repr(rope), "types that do not depend on the length")


def config_of(model: Any) -> str:
    """The model's class and the hash of its configuration, with RoPE's."""
    config = {
        name: value
        for name, value in model.config.to_dict().items()
        if name not in NOT_OF_THE_NUMBERS
    }
    text = json.dumps(config, sort_keys=True, default=str)
    return f"{type(model).__name__} {hashlib.sha256(text.encode()).hexdigest()}"


class Identity:
    """Weights and adapters of a model as they are now."""

    def __init__(self, model: Any, weights: str | Path | None) -> None:
        self._model = model
        self._given = _given(weights)
        self._seen: _State | None = None
        self._now = ("", "")

    def now(self) -> tuple[str, str]:
        """What names the weights, and the adapters."""
        if self._model.training:
            raise refused("model.training", True, "False (call model.eval())")
        adapters = list(_adapters(self._model))
        tensors = list(_tensors(self._model))
        state = (
            [_Seen(name, tensor) for name, tensor in tensors],
            # torch does not count changes under `inference_mode`, nor those through `.data`.
            engine_tensors.sample_of(tensor for _, tensor in tensors),
            [(name, _switches(module)) for name, module in adapters],
        )
        if state != self._seen:
            weights = self._given or _sum(_tensors(self._model))
            self._now = (weights, _hash_of_adapters(adapters))
            self._seen = state
        return self._now


def _given(weights: str | Path | None) -> str | None:
    if isinstance(weights, Path):
        suffixes = engine_weights.WEIGHT_SUFFIXES
        if not any(file.suffix in suffixes for file in weights.iterdir()):
            allowed = f"a directory with files of {', '.join(suffixes)}"
            raise refused("weights", repr(str(weights)), allowed)
        return engine_weights.of_directory(weights)
    if weights is not None and not weights:
        raise refused("weights", repr(weights), "a non-empty name, a pathlib.Path or None")
    return weights


def _rope_types(config: Any) -> Iterator[str]:
    if isinstance(config, dict):
        for name in ("rope_type", "type"):
            if isinstance(config.get(name), str):
                yield config[name]
        for value in config.values():
            yield from _rope_types(value)


def _tensors(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers, also those that are not saved with a model: RoPE's frequencies."""
    state = module.state_dict(keep_vars=True)
    yield from state.items()
    for name, buffer in module.named_buffers():
        if name not in state:
            yield name, buffer


class _Seen:
    """A tensor as it was: the same one, where it lay, and torch's count of its changes.

    An address alone says little: the next tensor may get that of one that is gone.
    """

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        version = 0 if tensor.is_inference() else tensor._version
        self._place = (name, tensor.data_ptr(), version)
        self._tensor = weakref.ref(tensor)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Seen):
            return NotImplemented
        tensor = self._tensor()
        return tensor is not None and tensor is other._tensor() and self._place == other._place


_State: TypeAlias = tuple[list[_Seen], bytes, list[tuple[str, str]]]


def _sum(tensors: Iterator[tuple[str, torch.Tensor]]) -> str:
    found = engine_tensors.sum_of(tensors)
    if found is None:
        raise refused("model's devices", "meta", "one device that holds all parameters")
    return found


def _adapters(model: Any) -> Iterator[tuple[str, Any]]:
    """PEFT's layers: they hold the layer that they adapt as `base_layer`."""
    for name, module in model.named_modules():
        if hasattr(module, "base_layer") and hasattr(module, "active_adapters"):
            yield name, module


def _switches(module: Any) -> str:
    names = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
    return repr([getattr(module, name, None) for name in names])


def _hash_of_adapters(adapters: list[tuple[str, Any]]) -> str:
    """Nothing for a model without any; with the adapters' own weights, which `weights` lacks."""
    if not adapters:
        return ""
    digest = hashlib.sha256()
    for name, module in adapters:
        own = ((key, one) for key, one in _tensors(module) if not key.startswith("base_layer."))
        digest.update(repr((name, _switches(module), _sum(own))).encode())
    return digest.hexdigest()
