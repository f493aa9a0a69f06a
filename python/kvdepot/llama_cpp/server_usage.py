"""`cached_tokens` in the usage that clients see.

llama-cpp-python 0.3.36 answers with prompt_tokens and completion_tokens alone. Its routes declare
what they answer, so FastAPI drops any other field, and its streams end without a usage, whatever
`stream_options` asks for. So the counts go past it: who computes an answer writes them into the
request's note, and an ASGI middleware puts them into what is sent.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/engines/copilot-codex/completions")
DONE = b"data: [DONE]"
JSON = b"application/json"
EVENTS = b"text/event-stream"


@dataclass
class Note:
    """What one request has cost, in tokens. Of the prompt, `cached_tokens` were not computed."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def usage(self) -> dict[str, Any]:
        """As OpenAI's API says it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


# Threads of the server's pool start with the context of the request that they work for.
_CURRENT: ContextVar[Note | None] = ContextVar("kvdepot_usage", default=None)


def current() -> Note:
    """The note of the request that is being answered; one that nobody reads outside of any."""
    return _CURRENT.get() or Note()


class UsageMiddleware:
    """Adds `usage.prompt_tokens_details.cached_tokens` to answers, and a last chunk with the usage
    to streams that were asked for it by `stream_options.include_usage`."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """One connection's scope, as ASGI has it."""
        path = str(scope.get("path", ""))
        if scope["type"] != "http" or not path.endswith(PATHS):
            await self._app(scope, receive, send)
            return
        answer = _Answer(Note(), send)

        async def listen() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                answer.request += message.get("body", b"")
            return message

        before = _CURRENT.set(answer.note)
        try:
            await self._app(scope, listen, answer.send)
        finally:
            _CURRENT.reset(before)


@dataclass
class _Answer:
    """One request's answer on its way."""

    note: Note
    forward: Send
    request: bytearray = field(default_factory=bytearray)
    start: Message | None = None
    body: bytearray = field(default_factory=bytearray)
    streams: bool = False
    chunk: bytes = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = dict(message.get("headers", ())).get(b"content-type", b"")
            if message["status"] == 200 and kind.startswith(JSON):
                # Its length changes: it is sent with the whole body.
                self.start = message
                return
            self.streams = kind.startswith(EVENTS) and self._wants_usage()
        elif message["type"] == "http.response.body" and self.start is not None:
            self.body += message.get("body", b"")
            if not message.get("more_body"):
                await self._send_whole(self.start)
            return
        elif message["type"] == "http.response.body" and self.streams:
            await self._before_the_end(message.get("body", b""))
        await self.forward(message)

    async def _send_whole(self, start: Message) -> None:
        body = self._with_details(bytes(self.body))
        start["headers"] = [
            (name, str(len(body)).encode() if name == b"content-length" else value)
            for name, value in start["headers"]
        ]
        await self.forward(start)
        await self.forward({"type": "http.response.body", "body": body})

    def _with_details(self, body: bytes) -> bytes:
        try:
            answer = json.loads(body)
            usage = answer["usage"]
            # A chat format may have asked the model several times: what it says counts.
            cached = min(self.note.cached_tokens, usage["prompt_tokens"])
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
            return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()
        except (ValueError, KeyError, TypeError):
            return body  # no answer with a usage

    def _wants_usage(self) -> bool:
        try:
            options = json.loads(self.request)["stream_options"]
            return bool(options["include_usage"])
        except (ValueError, KeyError, TypeError):
            return False

    async def _before_the_end(self, event: bytes) -> None:
        if not event.startswith(DONE):
            if event.startswith(b"data: "):
                self.chunk = event
            return
        try:
            last = json.loads(self.chunk.removeprefix(b"data: "))
        except ValueError:
            return  # nothing came before it
        chunk = {name: last.get(name) for name in ("id", "object", "created", "model")}
        chunk |= {"choices": [], "usage": self.note.usage()}
        self.streams = False
        event = b"data: " + json.dumps(chunk).encode() + b"\n\n"
        await self.forward({"type": "http.response.body", "body": event, "more_body": True})
