"""State of the replicas for Prometheus, read when it is scraped. One series a replica: as many as are configured."""

from collections.abc import Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from app.backends.replicas import Replica


class ReplicaCollector(Collector):
    """Whether each replica takes requests, how many it computes, and its failures in a row."""

    def __init__(self, model_name: str, replicas: Sequence[Replica]) -> None:
        self._model_name = model_name
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        """One family for each figure."""
        names = ["model_name", "replica"]
        is_up = GaugeMetricFamily("firsttoken_replica_up", "1 while the replica takes requests", labels=names)
        running = GaugeMetricFamily("firsttoken_replica_requests_running", "Requests sent and not ended", labels=names)
        failures = GaugeMetricFamily("firsttoken_replica_failures", "Failures in a row", labels=names)
        for replica in self._replicas:
            labels = [self._model_name, replica.name]
            is_up.add_metric(labels, float(replica.state != "open"))
            running.add_metric(labels, replica.num_running)
            failures.add_metric(labels, replica.num_failures)
        yield from (is_up, running, failures)
