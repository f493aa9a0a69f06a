"""Alert rules, dashboard and scrape configuration: promtool, and a Prometheus that scrapes a depot.

Grafana does not run here: its variables are replaced, and Prometheus executes each query.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from served import SECONDS, client, served

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy/prometheus"
GROUPS = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
RULES = [rule for group in GROUPS for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
CASES = yaml.safe_load((FOLDER / "alerts_test.yaml").read_text())["tests"]
BOARD = json.loads((ROOT / "deploy/grafana/kvdepot.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]

METRIC = re.compile(r"\b(?:kvdepot_|vllm:)\w+")
SELECTOR = re.compile(METRIC.pattern + r"(?:\{[^}]*\})?")
REPOSITORY = "https://github.com/kvdepot/kvdepot/blob/main/"
TOKEN = "a-token-of-the-test"
# One scrapes OpenMetrics, and one scrapes the Prometheus text format.
JOBS = ("kvdepot", "kvdepot-text")
# Scrapes by each before the queries.
SCRAPES = 8


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"there is no {name} (Debian: prometheus)")
    return found


def promtool(*arguments: str, text: str = "") -> None:
    run = subprocess.run(
        [tool("promtool"), *arguments], cwd=FOLDER, input=text, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as the forge makes them."""
    headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_promtool_accepts_the_files_and_each_case() -> None:
    promtool("check", "config", "--syntax-only", "prometheus.yaml")
    promtool("check", "rules", "alerts.yaml")
    promtool("test", "rules", "alerts_test.yaml")


@pytest.mark.unit
def test_each_alert_links_to_its_section() -> None:
    assert ALERTS
    for name, alert in ALERTS.items():
        assert alert["labels"]["severity"] in ("critical", "warning"), name
        assert alert["annotations"].keys() == {"summary", "description", "runbook_url"}, name
        page, _, anchor = alert["annotations"]["runbook_url"].partition("#")
        assert page == f"{REPOSITORY}docs/troubleshooting.md", name
        assert anchor in anchors("docs/troubleshooting.md"), name


@pytest.mark.unit
def test_each_alert_fires_and_rests_in_a_case() -> None:
    fired: dict[str, set[str]] = {}
    for case in CASES:
        looks = case["promql_expr_test"]
        assert {look["expr"] for look in looks} == {'ALERTS{alertstate="firing"}'}
        assert not looks[-1]["exp_samples"], case["name"]
        for sample in (sample for look in looks for sample in look["exp_samples"]):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', sample["labels"]))
            fired.setdefault(labels["alertname"], set()).update(labels)
    assert fired.keys() == ALERTS.keys()
    for name, alert in ALERTS.items():
        used = re.findall(r"\$labels\.(\w+)", str(alert["annotations"]))
        assert set(used) <= fired[name], name


@pytest.mark.unit
def test_each_panel_has_a_place_a_unit_and_a_query() -> None:
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    places: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        columns, lines = range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])
        place = {(column, line) for column in columns for line in lines}
        assert not place & places, panel["title"]
        assert columns[-1] < 24, panel["title"]
        places |= place
    for panel in PANELS:
        assert panel["datasource"]["uid"] == "${datasource}", panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["targets"], panel["title"]
        assert all(METRIC.search(target["expr"]) for target in panel["targets"]), panel["title"]


# ---- with a depot ----------------------------------------------------------------------------

# New blocks each time: misses, puts, hits and evictions.
LOAD = """
import os, sys, kvdepot
depot = kvdepot.open(sys.argv[1])
ns = depot.namespace(model="monitoring", dtype="float16", block_tokens=16)
first = int.from_bytes(os.urandom(3), "little")
keys = kvdepot.keys(range(first, first + 512), block_tokens=16)
buffers = [bytearray(1 << 16) for _ in keys]
assert not any(ns.get(keys, buffers).wait(30))
assert any(ns.put(keys, [os.urandom(1 << 16) for _ in keys]).wait(30))
assert any(ns.get(keys, buffers).wait(30))
print("stored and loaded")
"""


class Relay(BaseHTTPRequestHandler):
    """Requests the Prometheus text format from the depot: Prometheus prefers OpenMetrics."""

    depot = ""

    def do_GET(self) -> None:
        status, kind, text = read(self.depot, "text/plain", self.headers.get("Authorization", ""))
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        """Prometheus reports failed scrapes."""


def read(address: str, accept: str, authorization: str = f"Bearer {TOKEN}") -> tuple[int, str, str]:
    """Status, format and text of a depot's metrics."""
    headers = {"Accept": accept, "Authorization": authorization}
    request = urllib.request.Request(f"http://{address}/metrics", headers=headers)
    try:
        response = urllib.request.urlopen(request, timeout=SECONDS)
    except urllib.error.HTTPError as error:
        response = error
    with response:
        return response.status, response.headers["Content-Type"], response.read().decode()


@dataclass
class Scraped:
    """A depot, and the Prometheus that scrapes it."""

    depot: str
    prometheus: str

    def api(self, path: str, **query: str) -> Any:
        """The data of a response of Prometheus."""
        url = f"http://{self.prometheus}/api/v1/{path}"
        # The names of some parameters end with brackets.
        query = {name.replace("__", "[]"): value for name, value in query.items()}
        with urllib.request.urlopen(f"{url}?{urllib.parse.urlencode(query)}") as response:
            return json.load(response)["data"]

    def rows(self, query: str) -> list[dict[str, Any]]:
        """The rows that a query returns now."""
        try:
            return self.api("query", query=query)["result"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{query}\n{error.read().decode()}") from None

    def scrapes(self) -> int:
        """The number of successful scrapes, of the job with the fewest."""
        errors = [target["lastError"] for target in self.api("targets")["activeTargets"]]
        assert not any(errors), errors
        rows = self.rows("sum_over_time(up[1h])")
        found = {row["metric"]["job"]: int(row["value"][1]) for row in rows}
        return min(found.get(job, 0) for job in JOBS)


@contextlib.contextmanager
def prometheus(depot: str, relay: str, folder: Path) -> Iterator[str]:
    """Prometheus with the example configuration, and a second job that scrapes the relay."""
    config = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": [depot]}]
    text = {**job, "job_name": JOBS[1], "static_configs": [{"targets": [relay]}]}
    config |= {"scrape_configs": [job, text]}
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    for file in config["rule_files"]:
        shutil.copy(FOLDER / file, folder)
    (folder / job["authorization"]["credentials_file"]).write_text(TOKEN)
    command = [tool("prometheus"), f"--config.file={folder}/prometheus.yaml"]
    command += [f"--storage.tsdb.path={folder}/data", "--web.listen-address=127.0.0.1:0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr
        address, log = "", []
        for line in process.stderr:
            log.append(line)
            if found := re.search(r'msg="Listening on".* address=(\S+)', line):
                address = found[1]
            if "ready to receive web requests" in line:
                break
        else:
            pytest.fail("".join(log))
        yield address
    finally:
        process.terminate()
        process.communicate(timeout=SECONDS)


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    """A depot under a small load, which Prometheus has scraped in both formats."""
    tool("prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    tokens = folder / "tokens"
    tokens.write_text(f"{TOKEN}\n")
    tokens.chmod(0o600)
    options = ["dax.capacity=32MiB", "peer.name=a", "peer.capacity=32MiB"]
    options += ["peer.hosts=a 127.0.81.1:7700", f"http_token_file={tokens}"]
    arguments = [word for option in options for word in ("-o", option)]
    with served("--http", "127.0.0.1:0", *arguments, pipeline="Cache|Dax|Peer") as manager:
        assert manager.notification() == {"READY": "1"}
        # The port is the system's choice.
        depot = Path(f"{manager.socket}.http").read_text().strip()
        handler = type("ThisRelay", (Relay,), {"depot": depot})
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as relay:
            threading.Thread(target=relay.serve_forever, daemon=True).start()
            with prometheus(depot, f"127.0.0.1:{relay.server_port}", folder) as address:
                found = Scraped(depot, address)
                while found.scrapes() < SCRAPES:
                    assert client(f"unix:{manager.socket}", program=LOAD) == "stored and loaded\n"
                yield found
            relay.shutdown()


def described(text: str) -> set[str]:
    """The metrics that a text describes, also those without samples."""
    return set(re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE))


def has_samples(text: str) -> set[str]:
    """The metrics of a text that have samples."""
    return set(re.findall(r"^(\w+)[{ ]", text, re.MULTILINE))


@pytest.fixture(scope="module")
def metrics(scraped: Scraped) -> str:
    """The depot's metrics in the Prometheus text format."""
    status, kind, text = read(scraped.depot, "text/plain")
    assert (status, kind.partition(";")[0]) == (200, "text/plain")
    return text


def test_promtool_accepts_the_metrics(metrics: str) -> None:
    promtool("check", "metrics", text=metrics)


def test_prometheus_reads_the_same_metrics_in_both_formats(scraped: Scraped, metrics: str) -> None:
    assert read(scraped.depot, "text/plain", "")[0] == 401
    units = scraped.api("targets/metadata", metric="kvdepot_capacity_bytes")
    # Only OpenMetrics has units.
    found = {one["target"]["job"]: one["unit"] for one in units}
    assert found == dict(zip(JOBS, ("bytes", ""), strict=True))
    for job in JOBS:
        rows = scraped.rows(f'group by (__name__) ({{job="{job}", __name__=~"kvdepot_.*"}})')
        assert {row["metric"]["__name__"] for row in rows} == has_samples(metrics), job


def test_each_metric_exists(metrics: str) -> None:
    page = (ROOT / "docs/metrics.md").read_text()
    table = page.partition("\n## Under vLLM\n")[2].partition("\n## ")[0]
    rows = "".join(line for line in table.splitlines() if line.startswith("| `"))
    known = described(metrics) | set(METRIC.findall(rows)) | set(re.findall(r"\bvllm:\w+", page))
    definitions = [one.get("definition", "") for one in BOARD["templating"]["list"]]
    texts = [*QUERIES, *definitions, *(rule["expr"] for rule in RULES)]
    used = set(METRIC.findall(" ".join(texts)))
    assert used <= known, used - known


def with_values(scraped: Scraped) -> dict[str, str]:
    """The dashboard's variables, with all values that Prometheus has for them."""
    found = {"$__rate_interval": "5s"}
    for variable in BOARD["templating"]["list"]:
        if call := re.fullmatch(r"label_values\((.+), (\w+)\)", variable.get("definition", "")):
            match = replaced(call[1], found)
            values = scraped.api(f"label/{call[2]}/values", match__=match)
            assert values, variable["name"]
            # As Grafana writes the values of a variable with several values.
            escaped = [re.escape(value).replace("\\", "\\\\") for value in values]
            found[f"${variable['name']}"] = f"({'|'.join(escaped)})"
    return found


def replaced(query: str, variables: dict[str, str]) -> str:
    """A query without variables."""
    for name, value in variables.items():
        query = query.replace(name, value)
    assert "$" not in query, query
    return query


def test_each_query_of_the_dashboard_returns_rows(scraped: Scraped, metrics: str) -> None:
    variables, samples = with_values(scraped), has_samples(metrics)
    assert variables.keys() == {"$__rate_interval", "$instance", "$tier"}
    empty = []
    for query in QUERIES:
        rows = scraped.rows(replaced(query, variables))
        if not rows and samples.issuperset(METRIC.findall(query)):
            empty.append(query)
    assert not empty, empty


def test_each_rule_is_evaluated(scraped: Scraped, metrics: str) -> None:
    samples = has_samples(metrics)
    for rule in RULES:
        scraped.rows(rule["expr"])
        for selector in SELECTOR.findall(rule["expr"]):
            name = METRIC.match(selector)
            if name and name[0] in samples:
                assert scraped.rows(selector), selector
    groups = scraped.api("rules")["groups"]
    health = {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}
    assert health.keys() >= ALERTS.keys()
    assert set(health.values()) == {"ok"}, health
