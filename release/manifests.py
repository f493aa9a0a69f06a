"""Writes deploy/kubernetes from the chart, for users without Helm: `make manifests`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHART, FOLDER = ROOT / "deploy/helm/kvdepot", ROOT / "deploy/kubernetes"
# `helm template` of a Helm that was built from source claims to be an old cluster.
KUBE = "1.31.0"

OWN = ["server.enabled=false", "engine.enabled=true", "engine.mode=own"]
# Name of the file -> what it is, and the values that differ from the chart's.
FILES = {
    "server.yaml": ("One server per node: Cache|Nvme.", []),
    "vllm-attached.yaml": (
        "vLLM that uses the server of its node (server.yaml). Never run.",
        ["engine.enabled=true", "engine.model=MODEL"],
    ),
    "vllm-own.yaml": (
        "vLLM with a depot of its own, without a server. Never run.",
        [*OWN, "engine.model=MODEL"],
    ),
}
# What Helm adds for itself.
HELMS = re.compile(
    r"^ *(app\.kubernetes\.io/managed-by|helm\.sh/chart|checksum/config|# Source):.*\n",
    re.MULTILINE,
)


def render(helm: str, values: list[str], only: str = "") -> str:
    """Renders the chart with these values; `only` names a template."""
    command = [helm, "template", "kvdepot", str(CHART), "--kube-version", KUBE]
    command += [word for value in values for word in ("--set", value)]
    command += ["--show-only", f"templates/{only}"] if only else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def manifest(helm: str, name: str) -> str:
    """The text of a file of deploy/kubernetes."""
    what, values = FILES[name]
    text = render(helm, values, "engine.yaml" if name == "vllm-attached.yaml" else "")
    text = HELMS.sub("", text).replace("      annotations:\n    spec:", "    spec:")
    head = (
        f"# {what}\n# Rendered from deploy/helm/kvdepot by `make manifests`: docs/deploying.md.\n"
    )
    return head + text


def main() -> int:
    """The command."""
    helm = sys.argv[1] if len(sys.argv) > 1 else "helm"
    for name in FILES:
        (FOLDER / name).write_text(manifest(helm, name))
        print(FOLDER / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
