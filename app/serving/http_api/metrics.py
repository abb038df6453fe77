"""Prometheus metrics of one server, in a separate registry."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llama_adapter.app.captioning.tasks.answers import Answer
from llama_adapter.app.serving.online.base import OnlineService
from llama_adapter.app.serving.online.types import Observer

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_NAME = "llama_adapter"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_STAGE_SECONDS = (0.0005, 0.001, 0.0025, *_SECONDS[:11])
_METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE")  # all others are counted as `other`


class Metrics(Observer):
    """Counters and histograms. Pass it as the service's observer, and to `create_api`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own: dict[str, Any] = {"namespace": _NAME, "registry": self.registry}
        self._first_token = Histogram(
            "time_to_first_token_seconds", "From submission to the first text.", buckets=_SECONDS, **own
        )
        self._request = Histogram("request_seconds", "From submission to the answer.", buckets=_SECONDS, **own)
        self._stage = Histogram(
            "stage_seconds",
            "One engine pass by stage; one picture for `read`.",
            ("stage",),
            buckets=_STAGE_SECONDS,
            **own,
        )
        self._pictures = Counter("pictures", "Requests by the outcome of their picture.", ("outcome",), **own)
        self._tokens = Counter("tokens", "Tokens of answered requests.", ("kind",), **own)
        self._http = Counter("http_requests", "HTTP requests.", ("method", "route", "status"), **own)

    def first_token(self, seconds: float) -> None:
        """Observe the time from submission to the first text."""
        self._first_token.observe(seconds)

    def stage(self, stage: str, seconds: float) -> None:
        """Observe the time of a stage in one engine pass; for stage `read`, the time of one picture."""
        self._stage.labels(stage).observe(seconds)

    def finished(self, answer: Answer, seconds: float) -> None:
        """Count an answer, with or without an error."""
        self._request.observe(seconds)
        outcome = "reused" if answer.is_reused else "encoded"
        if answer.error is not None:
            outcome = answer.error.code
        elif not answer.digest:
            outcome = "none"  # the question is about no picture
        self._pictures.labels(outcome).inc()
        self._tokens.labels("prompt").inc(answer.prompt_tokens)
        self._tokens.labels("completion").inc(len(answer.token_ids))

    def http_request(self, *, method: str, route: str, status: int) -> None:
        """Count an HTTP request; `route` is the pattern of its path, not the path itself."""
        self._http.labels(method if method in _METHODS else "other", route, str(status)).inc()

    def watch(self, service: OnlineService) -> None:
        """Collect the state of a service at every scrape. Call it once."""
        self.registry.register(_Collected(partial(_of_status, service)))

    def watch_replicas(self, read: Callable[[], Mapping[str, Sequence[Metric]]]) -> None:
        """Collect the metrics of replicas at every scrape; `read` gives them by the replica's name. Call it once."""
        self.registry.register(_Collected(partial(_of_replicas, read)))

    def families(self) -> list[Metric]:
        """All metrics with their values, for `watch_replicas` in another process."""
        return list(self.registry.collect())

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _Collected(Collector):
    """Metrics that a function makes at every scrape."""

    def __init__(self, collect: Callable[[], Iterator[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterator[Metric]:
        return self._collect()


def _of_status(service: OnlineService) -> Iterator[Metric]:
    status = service.status()
    for name, text, value in (
        ("requests_running", "Requests that are being answered.", status.num_running),
        ("requests_waiting", "Requests that wait for a slot.", status.num_waiting),
        ("pictures_reading", "Pictures that are being read.", status.num_reading),
        ("pictures_slow_reading", "Pictures that are being read in the slow lane.", status.num_slow_reading),
        ("encoded_pictures", "Pictures in the cache of encoded pictures.", status.num_encoded),
        ("ready", "1 while requests are accepted.", int(status.state == "ready")),
        ("stalled", "1 while a step exceeds its time limit.", int(status.is_stalled)),
        ("uptime_seconds", "Since the start.", status.uptime_s),
    ):
        yield GaugeMetricFamily(f"{_NAME}_{name}", text, value=value)
    for name, text, value in (
        ("restarts", "Engine failures after which it was restarted.", status.restarts),
        ("rows_put_back", "Answers that waited for others to end, as memory was full.", status.num_put_back),
    ):
        yield CounterMetricFamily(f"{_NAME}_{name}", text, value)


def _of_replicas(read: Callable[[], Mapping[str, Sequence[Metric]]]) -> Iterator[Metric]:
    """`llama_adapter_X` of each replica as `llama_adapter_replica_X` with a label `replica`."""
    found: dict[str, Metric] = {}
    for replica, families in read().items():
        for family in families:
            name = _of_replica(family.name)
            merged = found.setdefault(name, Metric(name, family.documentation, family.type))
            merged.samples += [
                sample._replace(name=_of_replica(sample.name), labels={**sample.labels, "replica": replica})
                for sample in family.samples
            ]
    yield from (family for family in found.values() if family.samples)


def _of_replica(name: str) -> str:
    return f"{_NAME}_replica_{name.removeprefix(f'{_NAME}_')}"
