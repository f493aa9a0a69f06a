"""Every sample of README and the pages does what it says."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import forks
import pytest
from samples import LATER, Stage, commands, pages, samples

HAVE = {page: samples(page) for page in pages() if samples(page)}


@pytest.fixture
def stage() -> Iterator[Stage]:
    # Sockets have short paths.
    # The pages have paths without blanks, and write them so.
    root = Path(tempfile.mkdtemp(prefix="kvd-", dir="/tmp"))
    try:
        stage = Stage(root)
        yield stage
        stage.close()
    finally:
        shutil.rmtree(root)


# Some have a real model read a page.
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", HAVE)
def test_samples_of(page: str, stage: Stage) -> None:
    if any("import torch" in sample.text for sample in HAVE[page]):
        pytest.importorskip("torch")
        stage.interpreter = forks.command()
    for sample in HAVE[page]:
        stage.run(sample)
    # `make test` has pages of which a part is for later.
    lacks = {reason for sample in HAVE[page] if (reason := sample.lacks())} - {LATER}
    if lacks:
        pytest.skip(f"samples that were only checked: {', '.join(sorted(lacks))}")


@pytest.mark.unit
def test_there_are_samples() -> None:
    assert {"README.md", "docs/python.md", "docs/service.md", "docs/tiers/dax.md"} <= HAVE.keys()
    ran = [one for each in HAVE.values() for one in each if "not run" not in one.marks]
    assert {one.language for one in ran} >= {"python", "console", "yaml"}


WRONG = {
    "python": "import kvdepot\nkvdepot.keys([1], 0)\n",
    "console": "$ kvdepot lss\n",
    "sh": "false\ntrue\n",
    "yaml": "pipeline: Cache\ncache:\n  capactiy: 1MiB\n",
    "rust": "fn main() {}\n",
}


@pytest.mark.parametrize("language", WRONG)
def test_what_does_not_run_is_found(stage: Stage, language: str) -> None:
    page = f"```text\nfigure\n```\n```{language}\n{WRONG[language]}```\n"
    (sample,) = samples("page.md", page)
    assert (sample.line, sample.text) == (4, WRONG[language])
    with pytest.raises(Exception, match=r"."):
        stage.run(sample)


NOT_RUN = {
    "python": "if",
    "json": '{"kv_connector": "KvdepotConnector", "kv_connector_extra_config": {"lanse": 1}}',
    "yaml": "extra_config:\n  storage_plugin.a.module_path: x\n  dax.capactiy: 1\n",
    "bash": 'vllm serve --kv-transfer-config \'{"a": [{"pipeline": "Tape"}]}\'',
    "sh": "make nothing",
    "ini": "[Service\n",
}


@pytest.mark.unit
@pytest.mark.parametrize("language", NOT_RUN)
def test_what_is_not_run_is_checked(stage: Stage, language: str) -> None:
    page = f"<!-- not run: needs an engine -->\n```{language}\n{NOT_RUN[language]}\n```\n"
    (sample,) = samples("page.md", page)
    with pytest.raises(Exception, match=r"."):
        stage.run(sample)


@pytest.mark.unit
def test_what_needs_a_module_is_run_where_that_is_installed(stage: Stage) -> None:
    page = "<!-- needs: {} -->\n```python\nran = 1 / 0\n```\n"
    (sample,) = samples("page.md", page.format("nowhere_to_be_found"))
    assert sample.lacks() == "nowhere_to_be_found is not installed"
    stage.run(sample)
    (sample,) = samples("page.md", page.format("json, pathlib"))
    assert sample.lacks() == ""
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        stage.run(sample)


@pytest.mark.unit
def test_a_console_has_commands_and_what_they_print() -> None:
    text = "$ one 'a\n  b'\nprinted\n$ two \\\n  c\n"
    assert commands(text) == [("one 'a\n  b'", "printed\n"), ("two \\\n  c", "")]
