"""vLLM over `Cache|Ds3fs`, by UCM's own file and a double of 3FS's library."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path
from typing import Any

from engine_fleet import Fleet, Plan
from engine_harness import BLOCK, ROOT, assert_same, prompts
from test_file_tiers import CACHED, TOKENS, fault, files

# As UCM's guide has it, but for the mount.
PUBLISHED = """\
ucm_connectors:
  - ucm_connector_name: "UcmPipelineStore"
    ucm_connector_config:
      store_pipeline: "Cache|Ds3fs"
      storage_backends: "{mount}"

load_only_first_rank: false
"""


def settings(arena: Path) -> dict[str, Any]:
    """kvdepot's, in a file of UCM's; the mount and the library are made where they say."""
    arena.mkdir()
    LIBRARY.parent.mkdir(parents=True, exist_ok=True)
    source = ROOT / "crates/testkit/usrbio/double.c"
    command = ["cc", "-shared", "-fPIC", "-O1", "-pthread", f"-Wl,-soname,{LIBRARY.name}"]
    subprocess.run([*command, "-o", str(LIBRARY), str(source)], check=True)
    file = arena.with_suffix(".yaml")
    file.write_text(PUBLISHED.format(mount=arena))
    # Eight blocks, or one prompt.
    return {"UCM_CONFIG_FILE": str(file), "cache": {"capacity": "17MiB"}, "overload": "wait"}


# It has the library's name and is loaded before kvdepot asks for that: the loader answers with it.
LIBRARY = ROOT / "build/engine-3fs/libhf3fs_api_shared.so"
RINGS = Plan(
    "3fs",
    settings,
    ("--no-enable-prefix-caching",),
    environment={"KVDEPOT_DOUBLE_3FS": "{arena}", "ENGINE_LIBRARY": str(LIBRARY)},
)
SERVERS = [RINGS]


def test_blocks_come_back_by_the_rings(fleet: Fleet) -> None:
    engine, mount = fleet.take(RINGS), fleet.arena(RINGS)
    prompt, between = prompts(2, TOKENS, seed=117)
    first = engine.ask(prompt)
    engine.settle()
    engine.ask(between)
    engine.settle()
    stored = list(files(mount))
    assert len(stored) == 2 * (TOKENS // BLOCK)
    assert {path: fault(path) for path in stored if fault(path)} == {}
    served = engine.ask(prompt)
    assert served.cached_tokens == CACHED
    assert_same(served, first)
    assert engine.metric("kvdepot_moved_blocks_total", op="load", tier="Ds3fs") > 0
    assert engine.failed_loads() == 0
    threads = set[str]()
    for pid in engine.server.processes():
        for task in Path(f"/proc/{pid}/task").glob("*/comm"):
            with contextlib.suppress(OSError):  # One that has ended meanwhile.
                threads.add(task.read_text().strip())
    assert any(name.startswith("kvdepot-3fs-") for name in threads), "and not by the mount"
    engine.server.stop()
