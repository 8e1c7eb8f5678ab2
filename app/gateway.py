"""The gateway without HTTP: everything that lives as long as the process, put together in one place."""

import asyncio
from importlib.metadata import version
from typing import TYPE_CHECKING

import structlog

from app.auth import Authenticator, Principal
from app.backends.base import Backend, Reconfigurable
from app.backends.replica_metrics import ReplicaCollector
from app.chat_service import ChatService
from app.compaction import Compactor
from app.config_status import ConfigCollector, ReloadRecord
from app.drain import Drain
from app.errors import ConfigError, NotFoundError, OverloadedError
from app.input_budget import TtftObjective
from app.observability import EngineCollector, GatewayCollector, GatewayMetrics
from app.relay import RelayBackend
from app.served_model import ServedModel
from app.service_observer import ServiceObserver
from app.settings import Settings
from app.siblings import Siblings
from app.snapshot import LiveConfig
from app.tenancy import Tenancy
from app.workers import WorkerPool
from engine.cost_model import PrefillCostModel
from engine.errors import ModelError
from engine.process_logs import LogStyle
from reducer.encoder import Encoder
from reducer.reranker import Reranker

if TYPE_CHECKING:
    from app.tracing import Tracing


class Gateway:
    """Built from settings, started once, closed once."""

    def __init__(self, settings: Settings, workers: WorkerPool, backend: Backend) -> None:
        self.config = LiveConfig(settings)
        self.workers = workers
        self.backend = backend
        self.tenancy = Tenancy(self.config)
        self.directory = self.tenancy.directory
        self.admission = self.tenancy.admission
        self.drain = Drain()
        self.served_model = ServedModel(settings)
        self.metrics = GatewayMetrics(self.served_model.name)
        self.tracing = make_tracing(settings, self.served_model) if settings.tracing.enabled else None
        """Spans of requests, where they are on."""
        self.reloads = ReloadRecord()
        self.metrics.registry.register(ConfigCollector(lambda: self.reloads))
        self.encoder_state = "loading" if settings.encoder.enabled else "disabled"
        """``loading``, ``loaded``, ``disabled``, or ``failed: …``."""
        self.encoder: Encoder | None = None
        """The embedding model, once it is loaded."""
        self.siblings: Siblings | None = None
        """The other processes of this gateway, where there are any."""
        self._chat_service: ChatService | None = None
        self._start_lock = asyncio.Lock()

    @property
    def settings(self) -> Settings:
        """The settings in force. A request keeps those of the snapshot that it began with."""
        return self.config.settings

    @property
    def authenticator(self) -> Authenticator:
        """The keys of the file's tenants."""
        return self.config.current.authenticator

    @property
    def chat_service(self) -> ChatService:
        """The main path. Raises ``OverloadedError`` before the start."""
        if self._chat_service is None:
            raise OverloadedError("The gateway is starting; retry later.", retry_after_s=5.0)
        return self._chat_service

    @property
    def is_ready(self) -> bool:
        """Whether a completion would be served now, as configured."""
        is_encoder_ready = self.encoder_state in ("loaded", "disabled") or not self.settings.encoder.required
        return self._chat_service is not None and self.backend.is_alive and is_encoder_ready

    async def find_receipt(self, receipt_id: str, principal: Principal) -> bytes:
        """A record as JSON. Raises ``NotFoundError``, the same for one that is not there and one of others."""
        try:
            return await self.tenancy.find_receipt(receipt_id, principal)
        except NotFoundError:
            found = None if self.siblings is None else await self.siblings.find_receipt(receipt_id, principal)
            if found is None:
                raise
            return found

    async def render_metrics(self) -> bytes:
        """The metrics as Prometheus reads them, of all processes of this gateway."""
        return self.metrics.render() if self.siblings is None else await self.siblings.metrics()

    async def start(self) -> None:
        """Starts the backend and loads the encoder, side by side. Raises an error that says what is missing."""
        async with self._start_lock:
            if self._chat_service is not None:
                return
            backend, models, storage = await asyncio.gather(
                self.backend.start(), self._load_models(), self.tenancy.open(), return_exceptions=True
            )
            for outcome in (storage, backend, models):
                if isinstance(outcome, BaseException):
                    await self.backend.close()
                    await self.tenancy.close()
                    raise outcome
            assert not isinstance(models, BaseException), "failures were raised above"
            compactor = Compactor(self.backend.encoder, self.backend.info.max_model_len, *models)
            await self.workers.run(compactor.warm_up)
            self._chat_service = self._make_chat_service(compactor)

    async def use(self, settings: Settings) -> None:
        """Serves requests that begin from now on with other settings; those that run keep theirs.

        ``settings`` differ from those in force in live keys only (``app.config_changes``). Raises ``ConfigError`` where
        they cannot be used; nothing has changed then.
        """
        authenticator = await asyncio.to_thread(Authenticator, settings)
        await self.tenancy.check(settings)
        backend = self.backend if isinstance(self.backend, Reconfigurable) else None
        if backend is not None:
            backend.check(settings.backend)
        # From here on nothing waits and nothing fails.
        self.config.swap(self.config.next(settings, authenticator))
        self.tenancy.use_config()
        self.workers.limit(settings.server.max_pending_jobs)
        if backend is not None:
            backend.use(settings.backend)

    async def close(self) -> None:
        """Ends the backend and drops what waits for a thread. May be called twice."""
        await self.backend.close()
        await self.tenancy.close()
        self.workers.close()
        if self.tracing is not None:
            await self.tracing.close()

    def _make_chat_service(self, compactor: Compactor) -> ChatService:
        settings = self.settings
        chunk = settings.engine.scheduler.long_prefill_token_threshold
        step = settings.engine.scheduler.max_num_batched_tokens
        cost_model = (
            PrefillCostModel.from_model_info(self.backend.info, max_tokens_per_step=min(chunk, step) if chunk else step)
            if self.backend.info.num_layers
            else PrefillCostModel()  # computed elsewhere: only the times are known
        )
        objective = TtftObjective(cost_model)
        self.metrics.registry.register(
            EngineCollector(self.served_model.name, lambda: self.backend.stats, lambda: self.backend.is_alive)
        )
        self.metrics.registry.register(
            GatewayCollector(self.served_model.name, self.backend.info, lambda: self.tenancy.num_counter_failures)
        )
        if isinstance(self.backend, RelayBackend):
            self.metrics.registry.register(ReplicaCollector(self.served_model.name, self.backend.replicas))
        self.metrics.jobs.set_function(lambda: self.workers.num_pending)
        self.metrics.receipts.set_function(lambda: len(self.tenancy.memory_receipts))
        return ChatService(
            backend=self.backend,
            compactor=compactor,
            workers=self.workers,
            admission=self.admission,
            receipts=self.tenancy,
            objective=objective,
            observer=ServiceObserver(self.metrics, objective, self.served_model.name, self.tenancy, self.tenancy),
            drain=self.drain,
            served_model=self.served_model,
            refuse_long_outputs=settings.engine.admission.max_tokens_overflow == "refuse",
        )

    async def _load_models(self) -> tuple[Encoder | None, Reranker | None]:
        return await self._load_encoder(), await self._load_reranker()

    async def _load_encoder(self) -> Encoder | None:
        if not self.settings.encoder.enabled:
            return None
        try:
            encoder = await self.workers.run(load_encoder, self.settings)
        except ConfigError as error:
            self.encoder_state = f"failed: {error}"
            if self.settings.encoder.required:
                raise
            structlog.get_logger("firsttoken").warning("encoder_missing", reason=str(error))
            return None
        self.encoder, self.encoder_state = encoder, "loaded"
        return encoder

    async def _load_reranker(self) -> Reranker | None:
        if self.settings.reranker.model is None:
            return None
        try:
            return await self.workers.run(load_reranker, self.settings)
        except ConfigError as error:
            if self.settings.reranker.required:
                raise
            structlog.get_logger("firsttoken").warning("reranker_missing", reason=str(error))
            return None


def make_tracing(settings: Settings, served_model: ServedModel) -> "Tracing":
    """OpenTelemetry, imported here. Raises ``ConfigError`` where it is not installed."""
    try:
        from app.tracing import Tracing
    except ImportError as error:
        raise ConfigError(f"tracing.enabled needs {error.name}: pip install 'firsttoken[otel]'") from error

    return Tracing(
        settings.tracing,
        provider_name=settings.backend.flavour if settings.backend.kind == "openai" else "firsttoken",
        response_model=served_model.own_name,
        version=version("firsttoken"),
    )


def load_encoder(settings: Settings) -> Encoder:
    """Loads the embedding model; takes seconds. Raises ``ConfigError`` that says how to get it."""
    from engine.model_store import resolve_model
    from reducer.encoder import SentenceTransformerEncoder

    name = settings.encoder.model
    try:
        return SentenceTransformerEncoder(resolve_model(name), settings.reducer.encoder)
    except (ModelError, OSError, ValueError, ImportError) as error:
        raise ConfigError(
            f"encoder.model {name!r} cannot be loaded: {error}. Get it with `firsttoken models pull {name}`, "
            "or set encoder.required = false to rank by words alone."
        ) from error


def load_reranker(settings: Settings) -> Reranker:
    """Loads the cross-encoder; takes seconds. Raises ``ConfigError`` that says why it cannot be."""
    from engine.model_store import resolve_model
    from reducer.reranker import CrossEncoderReranker

    name = settings.reranker.model
    assert name is not None, "called only where a model is named"
    try:
        return CrossEncoderReranker(resolve_model(name))
    except (ModelError, OSError, ValueError, ImportError) as error:
        raise ConfigError(
            f"reranker.model {name!r} cannot be loaded: {error}. Set reranker.required = false to start without it."
        ) from error


def make_gateway(settings: Settings, backend: Backend | None = None) -> Gateway:
    """A gateway on the given backend, else on the one that the settings name. Nothing is started yet."""
    workers = WorkerPool(settings.server.num_workers, settings.server.max_pending_jobs)
    if backend is None and settings.backend.kind == "openai":
        from app.backends.openai import OpenAIBackend

        backend = OpenAIBackend(settings.backend, workers)
    if backend is None:
        from app.backends.embedded import EmbeddedBackend

        logging = settings.logging
        logs = LogStyle(level=logging.level, format=logging.format, exception_text=logging.exception_text)
        backend = EmbeddedBackend(settings.engine, workers, settings.disaggregation, logs)
    return Gateway(settings, workers, backend)
