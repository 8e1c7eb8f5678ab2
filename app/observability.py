"""Metrics in Prometheus' format: our prefix, vLLM's suffixes, bounded labels, nothing of a tenant or a prompt."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from app.compaction import Compaction
from app.generation import Generation
from app.metric_labels import finish_label
from app.plain_histogram import PlainHistogram, cumulative_buckets
from app.receipts import saved_tokens
from app.waterfall_metrics import WaterfallCollector
from engine.lengths import length_bucket
from engine.outputs import EngineStats, KVTransferStats, ModelInfo

disable_created_metrics()  # type: ignore[no-untyped-call]  # a series per counter that nobody graphs

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# The buckets of vLLM, so that its dashboards fit.
TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
    *(160, 640, 2560),
)
ITL_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
LATENCY_BUCKETS = (*(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680),)
STAGE_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
CHOICE_BUCKETS = (1, 2, 5, 10, 20)
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)


class EngineCollector(Collector):
    """State and counters of the engine, read when they are scraped."""

    def __init__(self, model_name: str, stats: Callable[[], EngineStats | None], is_alive: Callable[[], bool]) -> None:
        self._model_name = model_name
        self._stats = stats
        self._is_alive = is_alive

    def collect(self) -> Iterator[Metric]:
        """One family each; none but the engine's own health while it has not reported yet."""
        yield self._gauge("engine_alive", "1 while the engine answers", float(self._is_alive()))
        stats = self._stats()
        if stats is None:
            return
        yield self._gauge("num_requests_running", "Sequences running in the engine", stats.num_running)
        yield self._gauge("num_requests_waiting", "Sequences waiting in the engine", stats.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", stats.kv_cache_usage)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up, once per sequence", stats.prompt_tokens)
        yield self._counter("prefix_cache_hits", "Prompt tokens from the prefix cache", stats.cached_prompt_tokens)
        yield self._counter("num_preemptions", "Sequences preempted", stats.num_preemptions)
        yield self._counter("engine_steps", "Steps of the engine", stats.num_steps)
        yield self._gauge("num_tokens_waiting", "Tokens of the waiting sequences", stats.num_waiting_tokens)
        refused = CounterMetricFamily(
            "firsttoken_requests_refused", "Requests that the engine refused", labels=["model_name", "reason"]
        )
        for reason, count in sorted(stats.num_refused.items()):
            refused.add_metric([self._model_name, reason], count)
        yield refused
        by_source = CounterMetricFamily(
            "firsttoken_prompt_tokens_by_source",
            "Prompt tokens by where they came from",
            labels=["model_name", "source"],
        )
        num_computed = stats.prompt_tokens - stats.cached_prompt_tokens - stats.transferred_prompt_tokens
        for source, count in (
            ("local_compute", num_computed),
            ("local_cache_hit", stats.cached_prompt_tokens),
            ("external_kv_transfer", stats.transferred_prompt_tokens),
        ):
            by_source.add_metric([self._model_name, source], count)
        yield by_source
        if stats.step_tokens is not None:
            steps = HistogramMetricFamily(
                "firsttoken_iteration_tokens_total", "Tokens computed in a step of the engine", labels=["model_name"]
            )
            buckets = cumulative_buckets(stats.step_tokens.upper, stats.step_tokens.counts)
            steps.add_metric([self._model_name], buckets, stats.step_tokens.sum)
            yield steps
        if stats.kv_transfer is not None:
            yield from self._transfers(stats.kv_transfer)

    def _transfers(self, stats: KVTransferStats) -> Iterator[Metric]:
        ended = CounterMetricFamily(
            "firsttoken_kv_transfers", "Transfers of KV blocks by how they ended", labels=["model_name", "outcome"]
        )
        outcomes = {"completed": stats.num_completed, "cancelled": stats.num_cancelled, **stats.num_failed}
        for outcome, count in sorted(outcomes.items()):
            ended.add_metric([self._model_name, outcome], count)
        yield ended
        yield self._counter("kv_transfer_bytes", "KV blocks received and found correct", stats.num_bytes)
        yield self._counter(
            "kv_transfer_recomputed_tokens",
            "Tokens computed because their KV blocks did not come",
            stats.recomputed_tokens,
        )

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"firsttoken_{name}", text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"firsttoken_{name}", text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family


class GatewayCollector(Collector):
    """What the gateway knows without counting it for Prometheus, read when it is scraped."""

    def __init__(self, model_name: str, info: ModelInfo, num_counter_failures: Callable[[], int]) -> None:
        self._model_name = model_name
        self._info = info
        self._num_counter_failures = num_counter_failures

    def collect(self) -> Iterator[Metric]:
        """One family each."""
        failures = CounterMetricFamily(
            "firsttoken_counter_failures",
            "Times the shared store of counters did not answer",
            labels=["model_name"],
        )
        failures.add_metric([self._model_name], self._num_counter_failures())
        yield failures
        info = self._info
        if not info.num_blocks:
            return  # computed elsewhere: nothing is known of its cache
        labels = {
            "model_name": self._model_name,
            "block_size": str(info.block_size),
            "num_blocks": str(info.num_blocks),
            "cache_dtype": info.kv_cache_dtype,
            "num_second_tier_blocks": str(info.num_second_tier_blocks),
        }
        cache = GaugeMetricFamily("firsttoken_cache_config_info", "The KV cache; always 1", labels=list(labels))
        cache.add_metric(list(labels.values()), 1)
        yield cache


class GatewayMetrics:
    """Everything the gateway itself measures; one registry per application."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"firsttoken_{name}", text, ["model_name", *labels], registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            names = ["model_name", *labels]
            return Histogram(f"firsttoken_{name}", text, names, buckets=buckets, registry=self.registry)

        self.waterfalls = WaterfallCollector(model_name)
        self.registry.register(self.waterfalls)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens computed or taken from the cache")
        self.prompt_tokens_cached = counter("prompt_tokens_cached", "Prompt tokens taken from the prefix cache")
        self.generation_tokens = counter("generation_tokens", "Output tokens")
        self.request_success = counter("request_success", "Answers by how they ended", "finished_reason")
        self.request_errors = counter("request_errors", "Errors told to clients", "status", "code")
        self.original_tokens = counter("original_prompt_tokens", "Prompt tokens before reduction")
        self.saved_tokens = counter("saved_prompt_tokens", "Prompt tokens that reduction took away")
        self.passages = counter("passages", "Passages by what happened to them", "action")
        self.stage_failures = counter(
            "stage_failures", "Stages that failed: left out (open), or the request refused (closed)", "stage", "mode"
        )
        self.degraded = counter("stage_degraded", "Stages that fell back to a cheaper method", "stage")
        self.budget_source = counter("budget_source", "Requests by the limit that set their budget", "source")
        self.count_mismatch = counter("prompt_count_mismatch", "Prompts that gateway and engine counted differently")

        self.ttft = histogram("time_to_first_token_seconds", "Arrival to first text", TTFT_BUCKETS, "length_bucket")
        self.tpot = histogram("request_time_per_output_token_seconds", "Decode time per output token", ITL_BUCKETS)
        self.e2e = histogram("e2e_request_latency_seconds", "Arrival to end", LATENCY_BUCKETS)
        self.queue_time = histogram("request_queue_time_seconds", "Waiting in the engine", LATENCY_BUCKETS)
        self.prefill_time = histogram(
            "request_prefill_time_seconds", "First scheduling to first token", LATENCY_BUCKETS, "length_bucket"
        )
        self.decode_time = histogram("request_decode_time_seconds", "First to last token", LATENCY_BUCKETS)
        self.inference_time = histogram("request_inference_time_seconds", "Prefill and decode", LATENCY_BUCKETS)
        self.reduce_time = histogram("request_reduce_time_seconds", "Reading and reducing", STAGE_BUCKETS)
        self.stage_time = histogram("stage_time_seconds", "One stage of the reducer", STAGE_BUCKETS, "stage")
        self.prompt_size = histogram("request_prompt_tokens", "Prompt tokens of a request", TOKEN_BUCKETS)
        self.generation_size = histogram("request_generation_tokens", "Output tokens of a request", TOKEN_BUCKETS)
        self.max_tokens = histogram("request_params_max_tokens", "Output tokens allowed", TOKEN_BUCKETS)
        self.num_choices = histogram("request_params_n", "Answers asked for", CHOICE_BUCKETS)
        self.longest = histogram("request_max_num_generation_tokens", "Tokens of the longest answer", TOKEN_BUCKETS)
        self.computed = histogram("request_prefill_kv_computed_tokens", "Prompt tokens not cached", TOKEN_BUCKETS)

        self.count_mismatch.labels(model_name)  # from the start, so that an alert sees the first one
        text = "Time between two texts of an answer"
        self.itl = PlainHistogram("firsttoken_inter_token_latency_seconds", text, ITL_BUCKETS, model_name)
        self.registry.register(self.itl)

        self.jobs = Gauge("firsttoken_worker_jobs", "Jobs waiting for or running in a thread", registry=self.registry)
        self.receipts = Gauge("firsttoken_receipts", "Receipts kept", registry=self.registry)

    def render(self) -> bytes:
        """The metrics as Prometheus reads them."""
        return generate_latest(self.registry)

    def on_compaction(self, compaction: Compaction) -> None:
        """Counts one reduction."""
        result, model = compaction.result, self._model_name
        self.original_tokens.labels(model).inc(result.original_prompt_tokens)
        self.saved_tokens.labels(model).inc(saved_tokens(result))
        self.budget_source.labels(model, result.budget.source).inc()
        self.reduce_time.labels(model).observe(compaction.reduce_s)
        for decision in result.documents:
            self.passages.labels(model, decision.action).inc()
        if result.denied_documents:
            self.passages.labels(model, "denied").inc(result.denied_documents)
        for stage in result.stages:
            self.stage_time.labels(model, stage.stage).observe(stage.ms / 1000)
            if stage.degraded is not None:
                self.degraded.labels(model, stage.stage).inc()
            if stage.failure:
                self.stage_failures.labels(model, stage.stage, "open").inc()

    def on_first_text(self, generation: Generation) -> None:
        """Notes when an answer began."""
        if generation.first_text_s is not None:
            bucket = length_bucket(generation.num_prompt_tokens)
            self.ttft.labels(self._model_name, bucket).observe(generation.first_text_s)
            if generation.waterfall is not None:
                self.waterfalls.add(generation.num_prompt_tokens, generation.waterfall)

    def on_end(self, generation: Generation) -> None:
        """Counts one generation by how it ended; times only of complete ones, so that failures do not look fast."""
        model, timings = self._model_name, generation.timings
        self.prompt_tokens.labels(model).inc(generation.num_prompt_tokens)
        self.prompt_tokens_cached.labels(model).inc(generation.num_cached_tokens)
        self.generation_tokens.labels(model).inc(generation.num_output_tokens)
        self.request_success.labels(model, finish_label(generation.outcome)).inc()
        self.num_choices.labels(model).observe(len(generation.choices))
        if generation.finish_reason is None or timings is None:
            return
        bucket = length_bucket(generation.num_prompt_tokens)
        self.e2e.labels(model).observe(generation.elapsed_s)
        self.queue_time.labels(model).observe(timings.queue_ms / 1000)
        self.prefill_time.labels(model, bucket).observe(timings.prefill_ms / 1000)
        self.decode_time.labels(model).observe(timings.decode_ms / 1000)
        self.inference_time.labels(model).observe((timings.prefill_ms + timings.decode_ms) / 1000)
        self.prompt_size.labels(model).observe(generation.num_prompt_tokens)
        self.generation_size.labels(model).observe(generation.num_output_tokens)
        self.max_tokens.labels(model).observe(generation.max_tokens)
        self.longest.labels(model).observe(max(choice.num_output_tokens for choice in generation.choices))
        self.computed.labels(model).observe(max(0, generation.num_prompt_tokens - generation.num_cached_tokens))
        num_tokens = generation.choices[0].num_output_tokens  # whose timings these are
        if num_tokens > 1:
            self.tpot.labels(model).observe(timings.decode_ms / 1000 / (num_tokens - 1))
