"""What `python -m kvdepot.llama_cpp` takes: its server's own flags, and where states are kept."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_cpp.server.cli import add_args_from_model, parse_model_from_args
from llama_cpp.server.settings import (
    ConfigFileSettings,
    ModelSettings,
    ServerSettings,
    Settings,
)
from pydantic import ValidationError

import kvdepot
from kvdepot import _native
from kvdepot.engine import files

CAPACITY = "10GiB"
"""What a new directory may hold, unless --capacity says otherwise."""

DESCRIPTION = """\
llama-cpp-python's OpenAI-compatible server, with a persistent prompt cache. The server stores the
KV state of each conversation in a depot. The next request that begins with the same tokens loads
the state and computes only the remaining tokens: in the same process, after a restart or a kill,
and in another server with the same depot. Clients need no changes. The field
`usage.prompt_tokens_details.cached_tokens` of a response is the number of prompt tokens that were
loaded. Loaded data is verified; the server computes tokens whose data fails verification.
"""

EPILOG = """\
examples:
  python -m kvdepot.llama_cpp --model qwen3-8b.gguf --n_ctx 16384 --depot /mnt/kv --capacity 64GiB
  python -m kvdepot.llama_cpp --model qwen3-8b.gguf --port 8001 --depot /mnt/kv   # a second one
  python -m kvdepot.llama_cpp --config_file models.yaml --depot unix:/run/kvdepot.sock

After Ctrl-C or SIGTERM, the server completes running requests, writes waiting states, and exits.
GET /extras/kvdepot returns statistics of reuse and storage. See docs/engines/llama_cpp_server.md.
"""


class StartError(Exception):
    """The server cannot start; the text says what to do."""


@dataclass(frozen=True)
class Options:
    """What a start needs."""

    server: ServerSettings
    models: list[ModelSettings]
    depot: str
    capacity: str | None


def parser() -> argparse.ArgumentParser:
    """All flags, kvdepot's first."""
    made = argparse.ArgumentParser(
        prog="python -m kvdepot.llama_cpp",
        usage="%(prog)s --model FILE [--depot DIR] [--capacity SIZE] [FLAG VALUE]...",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    own = made.add_argument_group("prompt cache")
    # argparse takes a percent sign for one of its own.
    default = str(default_directory()).replace("%", "%%")
    own.add_argument(
        "--depot",
        metavar="DIR|FILE|unix:SOCKET",
        help="storage for the states of conversations: a directory, which any number of servers "
        "can share; a configuration file of a depot (.yaml, .yml, .json); or the socket of a "
        f"`kvdepot serve` process (default: {default})",
    )
    own.add_argument(
        "--capacity",
        metavar="SIZE",
        help="maximum total size of the files in the directory, such as 64GiB; the least recently "
        "used files are evicted. All servers that share a directory need the same value "
        f"(default: {CAPACITY} for a new directory, else the directory's value)",
    )
    theirs = made.add_argument_group(
        "flags of llama-cpp-python (all flags of `python -m llama_cpp.server`)"
    )
    add_args_from_model(theirs, Settings)
    theirs.add_argument("--config_file", type=str, help="Path to a config file to load.")
    return made


def default_directory() -> Path:
    """In the user's cache directory, wherever that is by then."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "kvdepot" / "llama_cpp"


def parse(argv: list[str] | None = None) -> Options:
    """The options of a command line; ends the process with a message for wrong ones."""
    made = parser()
    given = made.parse_args(argv)
    try:
        server, models = _settings(given)
        _check(models, given)
    except ValidationError as error:
        made.error("; ".join(_one(problem) for problem in error.errors()))
    except (StartError, OSError, ValueError) as error:
        made.error(str(error))
    depot = given.depot or str(files.cache_directory() / "llama_cpp")
    return Options(server, models, depot, given.capacity)


def _settings(given: argparse.Namespace) -> tuple[ServerSettings, list[ModelSettings]]:
    """As `python -m llama_cpp.server` has them: of a file, or of flags and the environment."""
    file = os.environ.get("CONFIG_FILE", given.config_file)
    if not file:
        return parse_model_from_args(ServerSettings, given), [
            parse_model_from_args(ModelSettings, given)
        ]
    text = Path(file).read_text()
    if file.endswith((".yaml", ".yml")):
        import yaml

        text = json.dumps(yaml.safe_load(text))
    settings = ConfigFileSettings.model_validate_json(text)
    # The app would read it once more, and take its settings for ours.
    os.environ.pop("CONFIG_FILE", None)
    return ServerSettings.model_validate(settings), settings.models


def _check(models: list[ModelSettings], given: argparse.Namespace) -> None:
    if not models:
        raise StartError("config_file: models is empty; list at least one model")
    for model in models:
        if model.hf_model_repo_id is None and not os.path.isfile(model.model):
            raise StartError(f"--model: {model.model!r} is not a file; set the path of a GGUF file")
        if model.cache:
            raise StartError(
                "--cache: true enables llama-cpp-python's own cache, which kvdepot replaces; "
                "omit --cache, --cache_type and --cache_size"
            )
    if given.capacity is not None:
        if _native._size(given.capacity) is None:
            raise StartError(f"--capacity: {given.capacity!r} is not a size such as 64GiB or 500MB")
        if given.depot is not None and _is_configured(given.depot):
            raise StartError(
                f"--capacity: {given.capacity!r} is not allowed with --depot {given.depot!r}, "
                "which has its own capacity; use --capacity only with a directory"
            )


def _one(problem: Any) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "missing":
        return f"--{where}: is required"
    return f"--{where}: {problem['input']!r} is not allowed; allowed: {problem['msg']}"


def _is_configured(depot: str) -> bool:
    return depot.startswith("unix:") or depot.endswith((".yaml", ".yml", ".json"))


def open_depot(options: Options) -> kvdepot.Depot:
    """The depot of `--depot`.

    Raises StartError where it cannot be opened.
    """
    try:
        if _is_configured(options.depot):
            return kvdepot.open(options.depot)
        directory = Path(options.depot)
        # A directory that is shared keeps what it was made with.
        new = not (directory / "settings").exists()
        capacity = options.capacity or (CAPACITY if new else None)
        posix = {"path": str(directory)} | ({"capacity": capacity} if capacity else {})
        return kvdepot.open("Posix", {"posix": posix, "socket": "off"})
    except (kvdepot.Error, OSError) as error:
        hint = "; start one with `kvdepot serve`" if options.depot.startswith("unix:") else ""
        raise StartError(f"--depot: {options.depot!r} cannot be opened: {error}{hint}") from error
