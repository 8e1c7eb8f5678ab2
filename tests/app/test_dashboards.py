"""The example dashboard and alerts: their form is Grafana's and Prometheus', and every metric and label exists."""

import contextlib
import itertools
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from factories_app import EchoBackend, bearer, make_app, make_body, make_documents, make_settings, served
from factories_upstream import gateway_on, running_upstream
from prometheus_client.parser import text_string_to_metric_families

from engine.outputs import EngineStats
from engine.stats import EngineCounters
from eval.launcher import free_port

FOLDER = Path(__file__).resolve().parents[2] / "app" / "dashboards"
DASHBOARD = json.loads((FOLDER / "firsttoken.json").read_text(encoding="utf-8"))
ALERTS = yaml.safe_load((FOLDER / "alerts.yml").read_text(encoding="utf-8"))
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
KINDS = {"row", "timeseries", "stat", "bargauge"}
VARIABLES = {
    "$__rate_interval": "1m",
    "$__range": "1m",
    "$model_name": ".*",
    "$length_bucket": ".*",
}
_METRIC = re.compile(r"\b(firsttoken_[a-z0-9_]+)(?:\{([^}]*)\})?")
_BY = re.compile(r"\bby \(([^)]*)\)")


class SteppingBackend(EchoBackend):
    """An echo whose engine tells its steps and refusals, as the real one does."""

    @property
    def stats(self) -> EngineStats:
        counters = EngineCounters()
        counters.add_step(16)
        base = super().stats
        fields = {name: getattr(base, name) for name in base.__struct_fields__}
        return EngineStats(**fields | {"step_tokens": counters.step_tokens.snapshot(), "num_refused": {"queue": 1}})


@contextlib.contextmanager
def two_gateways() -> Iterator[list[str]]:
    """One on an engine and one on an upstream, after an answer, a fall-back, an error each."""
    with (
        running_upstream() as upstream,
        served(make_app(make_settings(), SteppingBackend())) as embedded,
        gateway_on(upstream) as relaying,
    ):
        for url in (embedded, relaying):
            for body in (
                make_body(documents=make_documents(20), firsttoken={"reduce_deadline_ms": 0}),
                make_body(stream=True),
                make_body(model="nobody"),
            ):
                httpx.post(f"{url}/v1/chat/completions", json=body, headers=bearer())
        yield [embedded, relaying]


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """Metric names as Prometheus stores them, with the labels that their series have."""
    found: dict[str, set[str]] = {}
    with two_gateways() as urls:
        for url in urls:
            for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
                for sample in family.samples:
                    found.setdefault(sample.name, set()).update(sample.labels)
    return found


def expressions() -> list[str]:
    queries = [target["expr"] for panel in PANELS for target in panel.get("targets", ())]
    return queries + [rule["expr"] for group in ALERTS["groups"] for rule in group["rules"]]


def test_panels_have_ids_a_place_of_their_own_and_the_chosen_datasource() -> None:
    ids = [panel["id"] for panel in PANELS]
    assert len(ids) == len(set(ids))
    cells: set[tuple[int, int]] = set()
    for panel in PANELS:
        place = panel["gridPos"]
        assert set(place) == {"h", "w", "x", "y"}
        assert place["x"] + place["w"] <= 24
        own = {(place["x"] + dx, place["y"] + dy) for dx, dy in itertools.product(range(place["w"]), range(place["h"]))}
        assert not own & cells, f"{panel['title']} lies on another panel"
        cells |= own
        assert panel["type"] in KINDS
        assert panel["title"]
        if panel["type"] == "row":
            continue
        refs = [target["refId"] for target in panel["targets"]]
        assert refs
        assert len(refs) == len(set(refs))
        for holder in (panel, *panel["targets"]):
            assert holder["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["fieldConfig"]["defaults"]["unit"]


def test_the_dashboard_has_what_grafana_asks_for_and_variables_for_datasource_model_and_length() -> None:
    assert {"uid", "title", "schemaVersion", "panels", "templating", "time", "annotations", "tags"} <= DASHBOARD.keys()
    assert DASHBOARD["schemaVersion"] >= 36
    assert "id" not in DASHBOARD  # Grafana gives it on import
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    used = set(re.findall(r"\$([a-z_]+)\b", json.dumps(PANELS))) - {"datasource"}
    assert used <= variables.keys() | {"__rate_interval", "__range"}
    assert {"model_name", "length_bucket"} <= used


def test_every_metric_and_label_of_dashboard_and_alerts_is_exported(exported: dict[str, set[str]]) -> None:
    wrong: list[str] = []
    asked = [*expressions(), *(v["definition"] for v in DASHBOARD["templating"]["list"] if "definition" in v)]
    for query in asked:
        found = _METRIC.findall(query)
        assert found, query
        labels = set().union(*(exported.get(name, set()) for name, _ in found))
        for name, matchers in found:
            if name not in exported:
                wrong.append(name)
            told = re.findall(r"([a-z_]+)\s*(?:=~|!~|!=|=)", matchers)
            wrong += [f"{name}{{{label}}}" for label in told if label not in exported.get(name, set())]
        for group in _BY.findall(query):
            wrong += [f"by ({item}) in {query}" for item in map(str.strip, group.split(",")) if item not in labels]
    for target in (target for panel in PANELS for target in panel.get("targets", ())):
        names = {name for name, _ in _METRIC.findall(target["expr"])}
        labels = set().union(*(exported.get(name, set()) for name in names))
        wrong += [label for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]) if label not in labels]
    assert wrong == []


def test_rules_are_complete() -> None:
    rules = [rule for group in ALERTS["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    assert all(
        rule["labels"]["severity"] in ("warning", "critical") and rule["annotations"]["summary"] for rule in rules
    )


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed")
def test_a_real_prometheus_scrapes_the_gateways_and_answers_every_query(tmp_path: Path) -> None:
    port = free_port()
    with two_gateways() as urls:
        targets = [url.removeprefix("http://") for url in urls]
        config = {
            "global": {"scrape_interval": "1s"},
            "rule_files": [str(FOLDER / "alerts.yml")],
            "scrape_configs": [{"job_name": "firsttoken", "static_configs": [{"targets": targets}]}],
        }
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
        arguments = [
            f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        with subprocess.Popen(["prometheus", *arguments], stdout=sys.stderr, stderr=subprocess.DEVNULL) as process:
            try:
                empty = {query: answered(port, query) for query in expressions() if "firsttoken_replica" not in query}
                deadline = time.monotonic() + 60
                while time.monotonic() < deadline and not all(empty.values()):
                    for url in urls:
                        body = make_body(documents=make_documents(20), firsttoken={"reduce_deadline_ms": 0})
                        for sent in (body, make_body(model="nobody")):
                            httpx.post(f"{url}/v1/chat/completions", json=sent, headers=bearer())
                    time.sleep(1)
                    empty = {query: has_data or answered(port, query) for query, has_data in empty.items()}
                rules = httpx.get(f"http://127.0.0.1:{port}/api/v1/rules").json()["data"]["groups"][0]["rules"]
            finally:
                process.terminate()
    alerts = {rule["expr"] for group in ALERTS["groups"] for rule in group["rules"]}
    assert [query for query, has_data in empty.items() if not has_data and query not in alerts] == []
    assert {rule["health"] for rule in rules} == {"ok"}


def answered(port: int, query: str) -> bool:
    """Whether the query has a result; an error of its form fails the test."""
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    try:
        answer = httpx.get(f"http://127.0.0.1:{port}/api/v1/query", params={"query": query}).json()
    except (httpx.HTTPError, json.JSONDecodeError):  # it is still starting
        return False
    assert answer["status"] == "success", (query, answer.get("error"))
    return bool(answer["data"]["result"])
