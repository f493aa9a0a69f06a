"""Versions of vLLM: what is refused, what the adapters say, and which names they rely on."""

from __future__ import annotations

import ast
import contextlib
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import kvdepot
import pytest
import vllm_names

pytest.importorskip("vllm", reason="engine: vLLM is not installed (make test installs it)")
import vllm
from engine_tiers import offloading_config
from kvdepot.vllm import compat, messages, settings
from kvdepot.vllm import namespace as vllm_namespace
from kvdepot.vllm import tier as vllm_tier
from kvdepot.vllm.compat import internals, versions

pytestmark = pytest.mark.unit

PACKAGE = Path(kvdepot.__file__).parent / "vllm"
# What anybody may import: the connector's interface and its registry, loggers, platforms.
PUBLIC = ("vllm.logger", "vllm.platforms", f"{vllm_names.KV}.factory", f"{vllm_names.V1}.base")


def installed(monkeypatch: pytest.MonkeyPatch, version: tuple[Any, ...]) -> None:
    """The last part may begin with a plus, which vLLM has in the text alone."""
    parts = tuple(one.lstrip("+") if isinstance(one, str) else one for one in version)
    monkeypatch.setattr(vllm, "__version_tuple__", parts)
    monkeypatch.setattr(vllm, "__version__", ".".join(map(str, version)).replace(".+", "+"))


def without_kv_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.distributed.kv_events", ModuleType("kv_events"))
    monkeypatch.delitem(sys.modules, "kvdepot.vllm.compat.events")
    monkeypatch.delattr(compat, "events")


def adapter(name: str) -> Any:
    return importlib.import_module(f"kvdepot.vllm.compat.{name}").Adapter()


def tier(**given: Any) -> Any:
    """A tier over memory."""
    spec, rows = SimpleNamespace(config=offloading_config({})), memoryview(bytearray(64))
    memory = {"pipeline": "Cache", "cache": {"capacity": "1MiB"}, "weights": "w"}
    return vllm_tier.KvdepotTier(spec, rows, "KvdepotTier", **memory, **given)


@pytest.mark.parametrize(
    "version",
    [
        (0, 30, 1),
        (0, 34, 0),
        (1, 0, 0),
        (0, 0, "dev"),
        (0, 32, 1, "dev7", "+g1"),
        (0, 33, 0, "rc1"),
    ],
)
def test_other_versions_are_refused(
    monkeypatch: pytest.MonkeyPatch, version: tuple[Any, ...]
) -> None:
    installed(monkeypatch, version)
    with pytest.raises(kvdepot.ConfigError) as refused:
        versions.check(untested_allowed=False)
    said = str(refused.value)
    assert versions.RANGE in said
    assert "allow_untested_vllm: true" in said
    assert "\n" not in said
    versions.check(untested_allowed=True)


def test_a_version_without_a_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is allowed: the module cannot be imported."""
    installed(monkeypatch, (0, 20, 0))
    said = str(versions.lack(ImportError("cannot import name 'OffloadKey'")))
    assert "0.20.0" in said
    assert "OffloadKey" in said
    assert versions.RANGE in said
    assert versions.ALLOWED not in said


def test_a_version_without_kv_events_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one without any other name, though their module is another one."""
    installed(monkeypatch, (0, 20, 0))
    without_kv_events(monkeypatch)
    with pytest.raises(kvdepot.ConfigError, match=r"0\.20\.0.*AllBlocksCleared"):
        importlib.reload(compat)


def test_a_name_that_a_tested_version_lacks_is_no_error_of_the_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To install another version of the range would not help."""
    installed(monkeypatch, (0, 32, 0))
    without_kv_events(monkeypatch)
    with pytest.raises(ImportError, match="AllBlocksCleared"):
        importlib.reload(compat)


def test_a_tier_is_refused_before_its_depot_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*_: Any) -> Any:
        raise kvdepot.Error("opened")

    monkeypatch.setattr(vllm_tier, "_open", opened)
    installed(monkeypatch, (0, 40, 0))
    with pytest.raises(kvdepot.ConfigError, match="is not supported by kvdepot"):
        tier()
    with pytest.raises(kvdepot.Error, match="opened"):
        tier(allow_untested_vllm=True)


def test_the_nearest_adapter_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, name in (
        ((0, 30, 0), "v0_31"), ((0, 31, 0), "v0_31"), ((0, 32, 5), "v0_32"),
        ((0, 33, 0), "v0_33"), ((0, 40, 0), "v0_33"), ((0, 0, "dev"), "v0_33"),
        ((0, 32, 1, "dev7", "+g1"), "v0_32"),
    ):  # fmt: skip
        installed(monkeypatch, version)
        assert versions.adapter() == name


def test_every_adapter_is_there() -> None:
    for tested in versions.TESTED.values():
        assert isinstance(adapter(tested.adapter), internals.Adapter)
    assert versions.ALLOWED in settings.SETTINGS.by_name
    assert versions.ALLOWED in settings.TIER_SETTINGS.by_name


def test_what_never_ran_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    logger = SimpleNamespace(warning=lambda text, *args: lines.append(text % args))
    for version, wanted in (
        ((0, 31, 0), ["worker never run"]), ((0, 32, 0), []), ((0, 33, 0), ["worker never run"]),
        ((0, 40, 0), ["never tested"]),
    ):  # fmt: skip
        installed(monkeypatch, version)
        lines.clear()
        versions.say(logger)
        assert len(lines) == len(wanted)
        assert all(part in line for part, line in zip(wanted, lines, strict=True))


def test_blocks_of_another_minor_version_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = messages.RankGeometry(0, [64], ["layout"], "options")

    def layout(version: tuple[Any, ...], other: str = "5.19.0", *, shared: bool = False) -> str:
        installed(monkeypatch, version)
        monkeypatch.setattr(versions.transformers, "__version__", other)
        made_by = versions.of_blocks(shared=shared)
        return vllm_namespace.layout_of_ranks([geometry], 0, made_by)

    ours = layout((0, 32, 0))
    # One for each kind of device, and one with fixes.
    assert layout((0, 32, 0, "+cu129")) == layout((0, 32, 1), "5.19.2") == ours
    # Of a device that is called as a part of a version is.
    assert layout((0, 32, 0, "+b200"), "5.19.0+a100") == ours
    others = [layout((0, 33, 0)), layout((0, 32, 0), "5.20.0")]
    sources = [layout((0, 32, 1, f"dev{build}")) for build in (1, 2)]
    sources += [layout((0, 32, 0), other) for other in ("5.20.0.dev0", "5.20.0rc1", "5.20.0rc2")]
    assert len({ours, *others, *sources}) == 8
    shared = layout((0, 32, 0), shared=True)
    assert layout((0, 33, 0), "5.20.0", shared=True) == shared != ours


def test_chunks_of_another_minor_version_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def names(version: tuple[Any, ...], **given: Any) -> list[bytes]:
        installed(monkeypatch, version)
        made = tier(**given)
        found = [namespace.digest for namespace in made._namespaces.values()]
        made.shutdown()
        return found

    ours, shared = names((0, 32, 0)), names((0, 32, 0), share_vllm_versions=True)
    assert names((0, 32, 1)) == ours
    for group, name in enumerate(names((0, 33, 0))):
        assert name not in (ours[group], shared[group])
    assert names((0, 33, 0), share_vllm_versions=True) == shared != ours


def test_the_lock_is_taken_once() -> None:
    """From 0.33 on: in a step vLLM's scheduler has it."""
    exclusive: Callable[[Any], Any] = adapter("v0_33").exclusive
    taken: list[str] = []

    @contextlib.contextmanager
    def lock() -> Any:
        taken.append("taken")
        yield

    scheduler = SimpleNamespace(_step_region=None, manager=SimpleNamespace(lock=lock()))
    with exclusive(scheduler):
        assert taken == ["taken"]
    scheduler._step_region = contextlib.ExitStack()
    with exclusive(scheduler):
        assert taken == ["taken"]
    with adapter("v0_32").exclusive(SimpleNamespace()):
        pass


def test_adapters_from_elsewhere_are_told() -> None:
    given = SimpleNamespace(tensorizer_config_dict={"tensorizer_uri": "s3://x"})
    assert adapter("v0_31").is_elsewhere(given)
    assert not adapter("v0_31").is_elsewhere(SimpleNamespace(tensorizer_config_dict=None))
    assert not adapter("v0_32").is_elsewhere(SimpleNamespace())


def test_private_names_are_in_one_place() -> None:
    found = []
    for file in sorted(PACKAGE.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            elif isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            else:
                continue
            for module in modules:
                if module.startswith("vllm.") and module not in (*PUBLIC, vllm_names.V1):
                    found.append(f"{file.name}:{node.lineno}: {module}")
    assert found == []


def test_every_name_is_listed_and_there() -> None:
    """As in the sources of the installed version; `vllm_names` compares two of them."""
    tree = vllm_names.Tree(Path(vllm.__file__).parents[1])
    assert tree.minor == versions.here()
    names = list(vllm_names.names())
    wrong = [str(name) for name in names if (tree.find(name) is None) == tree.should_have(name)]
    assert wrong == []
    listed = {str(name) for name in names}
    assert vllm_names.imported(PACKAGE) - listed - {"vllm.envs", "vllm.__version__"} == set()
    assert compat.CacheHitSource.DISK == "disk"
