"""A local server that remembers: `python -m kvdepot.llama_cpp`.

llama-cpp-python's own OpenAI-compatible server, with all of its settings, and a cache of states
attached to its models. docs/engines/llama_cpp_server.md says what may be relied on.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI
from llama_cpp.server import app as llama_app

import kvdepot
from kvdepot.llama_cpp.server_model import RememberingProxy, say
from kvdepot.llama_cpp.server_options import Options, StartError, open_depot, parse
from kvdepot.llama_cpp.server_usage import UsageMiddleware


def main(argv: list[str] | None = None) -> int:
    """Serve until a signal comes; the exit status: 0, or 1 where it could not start."""
    options = parse(argv)
    try:
        depot = open_depot(options)
    except StartError as error:
        say(str(error))
        return 1
    with contextlib.closing(depot):
        try:
            app = make_app(options, depot)
        except Exception as error:
            if not isinstance(error, (kvdepot.Error, ValueError, OSError)):
                traceback.print_exc()
            say(f"cannot serve the model: {error}")
            return 1
        say(f"states are kept in {depot.description}")
        serve(app, options)
    return 0


def make_app(options: Options, depot: kvdepot.Depot) -> FastAPI:
    """llama-cpp-python's app, its models with caches over `depot`.

    It keeps its models in its module, so a process has one such app.
    """
    # create_app calls LlamaProxy by this name and takes no other.
    llama_app.LlamaProxy = functools.partial(RememberingProxy, depot=depot)
    app = llama_app.create_app(server_settings=options.server, model_settings=options.models)
    app.add_middleware(UsageMiddleware)
    app.add_api_route(
        "/extras/kvdepot",
        statistics,
        methods=["GET"],
        summary="What was reused and stored",
        dependencies=[Depends(llama_app.authenticate)],
        tags=[llama_app.extras_tag],
    )
    return app


async def statistics() -> dict[str, Any]:
    """Of the loaded model. Answered at once, also while a request is being answered."""
    return _proxy().statistics()


def serve(app: FastAPI, options: Options) -> None:
    """Serve until SIGINT or SIGTERM; then what waits is written."""
    server = options.server
    with _sigterm_returns():
        try:
            uvicorn.run(
                app,
                host=os.getenv("HOST", server.host),
                port=int(os.getenv("PORT", server.port)),
                ssl_keyfile=server.ssl_keyfile,
                ssl_certfile=server.ssl_certfile,
            )
        finally:
            end()


def end() -> None:
    """Write what waits."""
    if not _proxy().finish():
        # The second Ctrl-C does not wait for an answer; the thread that computes it cannot be
        # stopped, and would keep the process.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130)


def _proxy() -> RememberingProxy:
    proxy: RememberingProxy = llama_app._llama_proxy
    return proxy


@contextlib.contextmanager
def _sigterm_returns() -> Iterator[None]:
    """uvicorn ends at SIGTERM, and then raises it once more for who called it: by default that
    would end the process before anything is written."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
