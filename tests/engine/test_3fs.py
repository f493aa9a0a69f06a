"""vLLM over `Cache|Ds3fs`, by UCM's own file and a double of 3FS's library."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

import pytest
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


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """The folder in which the system's loader finds the double under the library's name."""
    folder = tmp_path / "library"
    folder.mkdir()
    source = ROOT / "crates/testkit/usrbio/double.c"
    target = folder / "libhf3fs_api_shared.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-pthread", "-o", str(target), str(source)]
    subprocess.run(command, check=True)
    return folder


def test_blocks_come_back_by_the_rings(fleet: Fleet, tmp_path: Path, library: Path) -> None:
    mount = tmp_path / "mount"
    mount.mkdir()
    file = tmp_path / "ucm_config.yaml"
    file.write_text(PUBLISHED.format(mount=mount))
    plan = Plan(
        "3fs",
        # Eight blocks, or one prompt.
        lambda _: {
            "UCM_CONFIG_FILE": str(file),
            "cache": {"capacity": "17MiB"},
            "overload": "wait",
        },
        ("--no-enable-prefix-caching",),
        environment={"KVDEPOT_DOUBLE_3FS": str(mount), "LD_LIBRARY_PATH": str(library)},
    )
    fleet.start(plan)
    engine = fleet.take(plan)
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
