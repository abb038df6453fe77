"""What Prometheus reads: counts and times of one server, in a registry of its own."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llama_adapter.app.online.service import Service
from llama_adapter.app.online.types import Observer
from llama_adapter.app.tasks.answers import Answer

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_NAME = "llama_adapter"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_STAGE_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE")  # others count as one


class Metrics(Observer):
    """Counts what happens. Pass it as the service's observer, and to `create_api`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._first_token = self._histogram("time_to_first_token_seconds", "From submit to the first text.", _SECONDS)
        self._request = self._histogram("request_seconds", "From submit to the answer.", _SECONDS)
        self._stage = self._histogram(
            "stage_seconds", "One pass of the engine by stage; of `read`, one picture.", _STAGE_SECONDS, ("stage",)
        )
        self._pictures = self._counter("pictures", "Requests by what became of their picture.", ("outcome",))
        self._tokens = self._counter("tokens", "Tokens of answered requests.", ("kind",))
        self._http = self._counter("http_requests", "HTTP requests.", ("method", "route", "status"))

    def first_token(self, seconds: float) -> None:
        """From submit to the first piece of text."""
        self._first_token.observe(seconds)

    def stage(self, stage: str, seconds: float) -> None:
        """Of one pass of the engine thread; of one picture for `read`."""
        self._stage.labels(stage).observe(seconds)

    def finished(self, answer: Answer, seconds: float) -> None:
        """An answer of any kind."""
        self._request.observe(seconds)
        reused = "reused" if answer.is_reused else "encoded"
        self._pictures.labels(answer.error.code if answer.error is not None else reused).inc()
        self._tokens.labels("prompt").inc(answer.prompt_tokens)
        self._tokens.labels("completion").inc(len(answer.token_ids))

    def http_request(self, *, method: str, route: str, status: int) -> None:
        """One HTTP request; `route` is the pattern of its path, never the path itself."""
        self._http.labels(method if method in _METHODS else "other", route, str(status)).inc()

    def watch(self, service: Service) -> None:
        """Read the service's own state from now on, at each look. Once for a registry."""
        self.registry.register(_StatusCollector(service))

    def render(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()) -> Histogram:
        return Histogram(f"{_NAME}_{name}", text, labels, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> Counter:
        return Counter(f"{_NAME}_{name}", text, labels, registry=self.registry)


class _StatusCollector(Collector):
    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        status = self._service.status()
        for name, text, value in (
            ("requests_running", "Requests that are being answered.", status.num_running),
            ("requests_waiting", "Requests that wait for a slot.", status.num_waiting),
            ("pictures_reading", "Pictures that are being read.", status.num_reading),
            ("pictures_slow_reading", "Of them, those that take long.", status.num_slow_reading),
            ("encoded_pictures", "Pictures that are kept encoded.", status.num_encoded),
            ("ready", "1 while requests are taken.", int(status.state == "ready")),
            ("stalled", "1 while a step takes longer than steps may.", int(status.is_stalled)),
            ("uptime_seconds", "Since the start.", status.uptime_s),
        ):
            yield GaugeMetricFamily(f"{_NAME}_{name}", text, value=value)
        yield CounterMetricFamily(f"{_NAME}_restarts", "Times the engine failed and was loaded anew.", status.restarts)
