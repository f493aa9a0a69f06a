"""Hosts as network namespaces of this machine, each with an address of its own on one switch.

The switch is a namespace, too: nothing of the machine's own network is touched, and when the
namespaces are gone nothing is left. They have this process's number in their names: those of a
process that was killed are removed by the next one that makes some.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

PREFIX = "kvdepot-test"
NAMES = re.compile(rf"{PREFIX}-(\d+)-\w+")
TOOLS = ("ip", "tc")


def run(*command: str) -> str:
    """What a command prints; its failure says what it said."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


@functools.cache
def why_not() -> str | None:
    """Why this machine can have no such hosts; None where it can."""
    if os.geteuid() != 0:
        return "only root can create network namespaces"
    for tool in TOOLS:
        if shutil.which(tool) is None:
            return f"there is no {tool} (Debian: iproute2)"
    name = f"{PREFIX}-{os.getpid()}-try"
    try:
        run("ip", "netns", "add", name)
        try:
            link = ("link", "add", "one", "type", "veth", "peer", "name", "two")
            run("ip", "-n", name, *link)
            run("ip", "-n", name, "link", "add", "switch", "type", "bridge")
        finally:
            run("ip", "netns", "delete", name)
    except OSError as error:
        return f"no network namespaces: {error}"
    return None


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that is over, and that nobody has waited for, does not."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    return "\nState:\tZ" not in status


def sweep() -> list[str]:
    """Removes what processes have left that are no more; their names."""
    left = []
    for name in run("ip", "netns", "list").split():
        found = NAMES.fullmatch(name)
        if found and not is_alive(int(found[1])):
            remove(name)
            left.append(name)
    return left


def remove(name: str) -> None:
    """Ends what runs in a namespace, and removes it."""
    for pid in run("ip", "netns", "pids", name).split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue
    run("ip", "netns", "delete", name)


class Host:
    """One of them."""

    def __init__(self, name: str, switch: str, number: int) -> None:
        self.name = name
        self.address = f"10.203.0.{number + 1}"
        self._switch = switch
        self._port = f"port{number}"
        run("ip", "netns", "add", name)
        far = ("peer", "name", self._port, "netns", switch)
        run("ip", "-n", name, "link", "add", "net", "type", "veth", *far)
        run("ip", "-n", switch, "link", "set", self._port, "master", "switch", "up")
        run("ip", "-n", name, "address", "add", f"{self.address}/24", "dev", "net")
        run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", name, "link", "set", "net", "up")

    def start(self, *command: str, **options: Any) -> subprocess.Popen[str]:
        """A process on it."""
        inside = ("ip", "netns", "exec", self.name, *command)
        return subprocess.Popen(inside, text=True, **options)

    def cut(self) -> None:
        """Pulls its cable."""
        run("ip", "-n", self._switch, "link", "set", self._port, "down")

    def join(self) -> None:
        """Puts it back."""
        run("ip", "-n", self._switch, "link", "set", self._port, "up")

    def slow(self, rate: str | None) -> None:
        """Both ways at most so much, such as "100mbit"; None: as fast as it goes."""
        for namespace, link in ((self._switch, self._port), (self.name, "net")):
            tc = ("tc", "-n", namespace, "qdisc")
            if rate is None:
                run(*tc, "delete", "dev", link, "root")
            else:
                bounds = ("rate", rate, "burst", "128kb", "latency", "50ms")
                run(*tc, "replace", "dev", link, "root", "tbf", *bounds)

    def on_arrival(self, rule: str | None) -> None:
        """Has nft's rule done to TCP that arrives, such as "drop"; None: nothing any more."""
        nft = ("ip", "netns", "exec", self.name, "nft")
        if rule is None:
            run(*nft, "flush ruleset")
            return
        run(*nft, "add table ip faults")
        hook = "{ type filter hook input priority 0; }"
        run(*nft, f"add chain ip faults arrival {hook}")
        run(*nft, f"add rule ip faults arrival ip protocol tcp {rule}")

    def heal(self) -> None:
        """Takes all of that back."""
        self.join()
        for namespace, link in ((self._switch, self._port), (self.name, "net")):
            if "tbf" in run("tc", "-n", namespace, "qdisc", "show", "dev", link):
                run("tc", "-n", namespace, "qdisc", "delete", "dev", link, "root")
        if shutil.which("nft"):
            self.on_arrival(None)


class Hosts:
    """So many of them; a context manager, which removes them whatever happens."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._own = f"{PREFIX}-{os.getpid()}"
        self.hosts: list[Host] = []

    def __enter__(self) -> list[Host]:
        sweep()
        switch = f"{self._own}-switch"
        try:
            run("ip", "netns", "add", switch)
            run("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
            run("ip", "-n", switch, "link", "set", "switch", "up")
            for number in range(self._count):
                self.hosts.append(Host(f"{self._own}-{number}", switch, number))
        except BaseException:
            self._remove()
            raise
        return self.hosts

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        for name in run("ip", "netns", "list").split():
            if name.startswith(f"{self._own}-"):
                remove(name)


def until(what: str, holds: Any, patience: float = 60.0) -> None:
    """Waits until something holds."""
    end = time.monotonic() + patience
    while not holds():
        assert time.monotonic() < end, f"not within {patience} s: {what}"
        time.sleep(0.02)
