"""Four questions about one long document, put to vLLM without kvdepot and to vLLM with it.

The server without kvdepot and the server with kvdepot both keep vLLM's own prefix cache, as users
have it. Between the questions the server with kvdepot is killed, and a second server opens the same
depot. The server that is not asked is stopped (SIGSTOP), so that two cores serve one at a time.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from . import measure, smollm
from .measure import Answer
from .server import Server
from .show import Show

ROOT = Path(__file__).resolve().parents[2]
# Read one after the other. The last one is written for readers who know nothing yet; a model of 135
# million parameters answers questions about it by quoting.
PAGES = (
    "docs/errors.md",
    "docs/service.md",
    "docs/durability.md",
    "README.md",
    "docs/faq.md",
)
DOCUMENT_CHARACTERS = 28_500
# With a question and its answer: the model ends at 8,192. A longer document is cut to this length.
DOCUMENT_TOKENS = 7_600
OUTPUT_TOKENS = 40
# Usual seconds to the first token if the prompt is in a cache, for the announcements.
HIT_S = 0.3
BLOCK_TOKENS = 128
PIPELINE = "Cache|Posix"

WITHOUT, WITH = "vLLM alone", "vLLM + kvdepot"


@dataclass(frozen=True)
class Question:
    """A question, and a word that a right answer to it has."""

    text: str
    word: str


QUESTIONS = (
    Question("What happens when the disk is full?", "old blocks"),
    Question("Where does kvdepot store the blocks?", "tiers"),
    Question("What stays when the server is killed?", "blocks on disk stay"),
    Question("Can two servers share one depot?", "Yes"),
)


@dataclass(frozen=True)
class Served:
    """One answer, and the cache that served the prompt's tokens, by vLLM's counters."""

    answer: Answer
    from_vllm: int
    """Tokens from vLLM's own prefix cache."""
    from_kvdepot: int
    """Tokens that kvdepot loaded."""


@dataclass(frozen=True)
class Asked:
    """One question, answered by both servers."""

    question: Question
    alone: Served
    depot: Served


@dataclass
class Result:
    """Everything that the story measured."""

    document_tokens: int
    asked: list[Asked]
    again_alone: Served
    """The third question again: vLLM's own cache after its reset."""
    hit: Served
    """The first question again, with vLLM's own cache emptied and kvdepot's server running."""
    storing_path_ms: float
    storing_cpu_ms: float


def document(characters: int = DOCUMENT_CHARACTERS) -> str:
    """The end of the pages, from the start of a line."""
    text = "\n".join((ROOT / page).read_text() for page in PAGES)
    if len(text) > characters:
        text = text[text.index("\n", len(text) - characters) + 1 :]
    return text


class Story:
    """Runs the story on real servers."""

    def __init__(self, work: Path, python: str, show: Show, characters: int) -> None:
        self.work = work
        self.show = show
        self._python = python
        self.document = document(characters)
        """What every question is about; the model may need it shorter."""
        self._depot_path = work / "depot"
        # The prompt's compute time, learnt from the first answer.
        self._compute_s = 10.0
        self.servers: list[Server] = []
        """Servers with kvdepot that are up."""

    def run(self) -> Result:
        """Tell the story; the servers with kvdepot are paused afterwards."""
        show = self.show
        show.say("kvdepot stores the KV cache that vLLM computes for a prompt. A server that is")
        show.say("restarted, or another server, loads it instead of computing the prompt again.")
        shutil.rmtree(self._depot_path, ignore_errors=True)
        with show.waiting("starting vLLM alone and vLLM with kvdepot", "40 to 70"):
            alone = self._launch("alone")
            depot = self._launch_depot("kvdepot")
            self._ready(alone, depot)
        with alone.running():
            tokens = self._fit(alone)
        show.say(f"the document: {tokens:,} tokens of {', '.join(PAGES)}")
        asked = []

        self._title(1, "Neither server has seen the document: both compute it, kvdepot stores it.")
        with depot.running():
            before = measure.costs(depot)
        asked.append(self._ask_both(0, alone, depot))
        with depot.running(), show.waiting("kvdepot writes the blocks to disk", 1):
            measure.wait_until_written(depot)
            path_s, cpu_s = (
                after - start for start, after in zip(before, measure.costs(depot), strict=True)
            )

        self._title(2, "The same servers: each has the document in vLLM's own prefix cache.")
        asked.append(self._ask_both(1, alone, depot, hits=(WITHOUT, WITH)))
        with depot.running(), show.waiting("kvdepot writes the blocks to disk", 1):
            measure.wait_until_written(depot)

        killed = len(depot.processes())
        depot.stop(hard=True)
        show.say()
        show.say(f"kill -9 of all {killed} processes of the server with kvdepot")
        with show.waiting("starting it again, and a second server over the same depot", "40 to 60"):
            depot, second = self._launch_depot("kvdepot-again"), self._launch_depot("second")
            self._ready(depot, second)
        with alone.running():
            alone.post("/reset_prefix_cache", {}).read()

        self._title(
            3,
            "The server with kvdepot was killed and started again. vLLM alone was not killed: its "
            "cache was emptied instead.",
        )
        asked.append(self._ask_both(2, alone, depot, hits=(WITH,)))
        with alone.running():
            again = self._ask(alone, self._messages(QUESTIONS[2]))
            alone.post("/reset_prefix_cache", {}).read()

        self._title(
            4,
            "A second server, another process over the same depot, that has never seen the "
            "document. vLLM alone had its cache emptied again.",
        )
        asked.append(self._ask_both(3, alone, second, hits=(WITH,)))
        alone.stop()
        second.stop()
        with (
            depot.running(),
            show.waiting("question 1 again, with vLLM's own cache emptied, for the table", 2),
        ):
            depot.post("/reset_prefix_cache", {}).read()
            hit = self._ask(depot, self._messages(QUESTIONS[0]))
        self.servers = [depot]
        return Result(tokens, asked, again, hit, path_s * 1e3, cpu_s * 1e3)

    def _fit(self, server: Server) -> int:
        """Cut the document until the model takes it with a question; its tokens then."""
        tokens = measure.count_tokens(server, self._messages())
        while tokens > DOCUMENT_TOKENS:
            self.document = document(len(self.document) * DOCUMENT_TOKENS // tokens)
            tokens = measure.count_tokens(server, self._messages())
        return tokens

    def _title(self, number: int, scene: str) -> None:
        self.show.say()
        self.show.say(f"Question {number}: {QUESTIONS[number - 1].text}")
        print(f"    {scene}", flush=True)

    def _messages(self, question: Question | None = None) -> list[dict[str, str]]:
        messages = [{"role": "system", "content": self.document}]
        if question is not None:
            messages.append({"role": "user", "content": question.text})
        return messages

    def _ask_both(
        self, number: int, alone: Server, depot: Server, *, hits: tuple[str, ...] = ()
    ) -> Asked:
        """Put a question to both; `hits` has the labels of those that load what they have read."""
        question = QUESTIONS[number]
        served = []
        for label, server in ((WITHOUT, alone), (WITH, depot)):
            usual_s = HIT_S if label in hits else self._compute_s
            with server.running():
                found = self._ask(server, self._messages(question), label, usual_s)
            if label not in hits:
                self._compute_s = found.answer.ttft_ms / 1e3
            served.append(found)
            computed = found.answer.prompt_tokens - found.answer.cached_tokens
            print(
                f"      [{found.answer.prompt_tokens:,} tokens: {found.from_vllm:,} from vLLM's "
                f"own cache, {found.from_kvdepot:,} from kvdepot, {computed:,} computed]",
                flush=True,
            )
        return Asked(question, *served)

    def _ask(
        self, server: Server, messages: list[dict[str, str]], label: str = "", usual_s: float = 0
    ) -> Served:
        names = ("vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total")
        before = [measure.metric(server, name) for name in names]

        def request(on_text=lambda _: None) -> Answer:
            return measure.chat(server, messages, output_tokens=OUTPUT_TOKENS, on_text=on_text)

        answer = self.show.answer(label, usual_s, request) if label else request()
        own, external = (
            int(measure.metric(server, name) - start)
            for name, start in zip(names, before, strict=True)
        )
        return Served(answer, own, external)

    def _ready(self, *servers: Server) -> None:
        for server in servers:
            server.wait_ready()
        for server in servers:
            server.pause()
        for server in servers:
            with server.running():
                measure.warm(server, BLOCK_TOKENS)

    def _launch(self, name: str, arguments: tuple[str, ...] = ()) -> Server:
        return Server(
            name,
            self.work / "model",
            log=self.work / f"{name}.log",
            arguments=["--max-model-len", str(smollm.MAX_MODEL_LEN), *arguments],
            environment={"VLLM_SERVER_DEV_MODE": "1"},  # for /reset_prefix_cache
            # Twice the longest prompt: the questions share it.
            kv_space_gib=1,
            python=self._python,
            say=lambda _: None,
        )

    def _launch_depot(self, name: str) -> Server:
        transfer = {
            "kv_connector": "KvdepotConnector",
            "kv_connector_module_path": "kvdepot.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "pipeline": PIPELINE,
                # A probe would compute the last block of each server's first hit.
                "probe_every": 0,
                "cache": {"capacity": "768MiB"},
                # It holds all blocks of the document: the connector drops what finds it full.
                "write_back_depth": "512MiB",
                "posix": {"path": str(self._depot_path), "capacity": "4GiB"},
            },
        }
        return self._launch(name, ("--kv-transfer-config", json.dumps(transfer)))
