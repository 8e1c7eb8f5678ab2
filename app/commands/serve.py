"""``firsttoken serve``: the gateway on a socket, until SIGINT or SIGTERM; SIGHUP reads its configuration anew.

With several processes this one starts and watches them (``app.supervisor``); each of them runs this command again.
"""

import asyncio
import contextlib
import gc
import math
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

import click
import uvicorn
from msgspec.structs import replace

from app.asgi import create_app
from app.config_file import read_config
from app.config_reload import ConfigReloader
from app.controllers.system import VERSION
from app.errors import ConfigError
from app.gateway import Gateway, make_gateway
from app.logs import configure_logging
from app.settings import ServerSettings, Settings
from app.siblings import ProcessPlace, Siblings
from app.supervisor import Supervisor, check_processes
from app.terminal import Terminal
from engine.config import DType, KVCacheDType, QuantizationName
from engine.errors import EngineError
from engine.outputs import ModelInfo

MAX_TENANTS_SHOWN = 5
FAREWELL_S = 2
"""After the grace time: for clients to take the error that ends their answer."""


@click.command()
@click.option("--config", "file", type=click.Path(path_type=Path), help="Configuration; default $FIRSTTOKEN_CONFIG.")
@click.option("--dtype", type=click.Choice(get_args(DType)), help="Of the computation: engine.model.dtype.")
@click.option(
    "--quantization",
    type=click.Choice(get_args(QuantizationName)),
    help="Of the weights: engine.model.quantization. Needs a passed record of `firsttoken eval quantization`.",
)
@click.option(
    "--kv-cache-dtype",
    type=click.Choice(get_args(KVCacheDType)),
    help="Of keys and values: engine.cache.kv_cache_dtype. Needs a passed record as well.",
)
@click.option("--force-quantization", is_flag=True, help="Serve a quantized format without a passed record.")
@click.option("--workers", type=click.IntRange(min=1), help="Processes that serve together: server.num_processes.")
def serve(
    file: Path | None,
    dtype: DType | None,
    quantization: QuantizationName | None,
    kv_cache_dtype: KVCacheDType | None,
    force_quantization: bool,
    workers: int | None,
) -> None:
    """Start the gateway. Options here go before the configuration and the environment."""
    # Threads of the encoder and of the engine, which inherits this, share the cores: where they spin while they wait
    # for each other, a step takes 6 to 50 times as long as with sleeping threads. OpenMP reads it when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    started = read_config(file)
    adjust = partial(
        adjusted,
        num_processes=workers,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        force_quantization=force_quantization or None,
    )
    place = ProcessPlace.from_environ()
    try:
        settings = adjust(started.settings)
        configure_logging(settings.logging)
        if settings.server.num_processes > 1 and place is None:
            run_loop(supervise(settings))
            return
        gateway = make_gateway(settings)
        reloader = ConfigReloader(gateway, started, adjust=adjust)
        run_loop(run_gateway(gateway, started.source, reloader, place))
    except (ConfigError, EngineError) as error:
        raise click.ClickException(str(error)) from error


def adjusted(settings: Settings, *, num_processes: int | None = None, **precision: Any) -> Settings:
    """``settings`` with the options of the command line. Raises ``ConfigError`` for what does not go together."""
    settings = with_precision(settings, **precision)
    if num_processes is not None:
        settings = replace(settings, server=replace(settings.server, num_processes=num_processes))
    check_processes(settings, settings.server.num_processes)
    return settings


async def supervise(settings: Settings) -> None:
    """Serves in several processes until a signal comes. Raises ``ConfigError`` where one of them cannot start."""
    server = settings.server
    with bind(server) as probe:  # refused where somebody else listens, whom a shared address would let in
        port: int = probe.getsockname()[1]
    with bind(replace(server, port=port), is_shared=True):  # held without listening while the processes come and go
        await Supervisor(
            [sys.executable, "-m", "app.cli", *sys.argv[1:]],
            host=server.host,
            port=port,
            num_processes=server.num_processes,
            grace_s=server.shutdown_grace_s,
        ).run()


def with_precision(
    settings: Settings,
    *,
    dtype: DType | None = None,
    quantization: QuantizationName | None = None,
    kv_cache_dtype: KVCacheDType | None = None,
    force_quantization: bool | None = None,
) -> Settings:
    """``settings`` with another precision of the engine; ``None`` leaves what is there."""
    changes = {"dtype": dtype, "quantization": quantization, "force_quantization": force_quantization}
    engine = settings.engine
    model = replace(engine.model, **{name: value for name, value in changes.items() if value is not None})
    cache = engine.cache if kv_cache_dtype is None else replace(engine.cache, kv_cache_dtype=kv_cache_dtype)
    return replace(settings, engine=replace(engine, model=model, cache=cache))


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """Runs ``main`` on the fastest event loop that there is for this system."""
    try:
        import uvloop
    except ImportError:  # there is none for Windows
        asyncio.run(main)
    else:
        uvloop.run(main)


async def run_gateway(
    gateway: Gateway, source: str, reloader: ConfigReloader | None = None, place: ProcessPlace | None = None
) -> None:
    """Serves until a signal comes, then lets running requests go on for the grace time and ends those that are left.

    ``source`` is where the settings come from, ``reloader`` follows them, ``place`` is that of one process of several.
    Raises ``ConfigError`` or ``EngineError`` where it cannot start.
    """
    listener = bind(gateway.settings.server, is_shared=place is not None)
    stop = asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(listener)
        stack.enter_context(stopped_by_signals(stop))
        try:
            if reloader is not None:
                await stack.enter_async_context(following(reloader, stop))
            if place is not None:
                await stack.enter_async_context(beside_siblings(gateway, place, stop))
            if not await started(gateway, stop):
                return
            # Modules and models live as long as the process: the collector need not look at them again and again.
            gc.collect()
            gc.freeze()
            server = uvicorn.Server(server_config(gateway.settings, gateway))
            serving = asyncio.create_task(quiet_signals(server).serve(sockets=[listener]))
            stopping = asyncio.create_task(stop.wait())
            while not server.started and not serving.done():
                await asyncio.sleep(0.01)
            if server.started:
                click.echo(ready_line(gateway, listener, source))
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            server.should_exit = True
            stopping.cancel()
            grace_s = gateway.settings.server.shutdown_grace_s
            server.config.timeout_graceful_shutdown = math.ceil(grace_s) + FAREWELL_S
            await asyncio.wait({serving}, timeout=grace_s)
            gateway.drain.end()
            await serving
        finally:
            await gateway.close()


async def started(gateway: Gateway, stop: asyncio.Event) -> bool:
    """Starts the gateway; ``False`` where a signal comes first. Raises what the start raises."""
    starting = asyncio.create_task(gateway.start())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return False
        await starting
        return True
    finally:
        for task in (starting, stopping):
            task.cancel()
        await asyncio.gather(starting, stopping, return_exceptions=True)


@contextlib.asynccontextmanager
async def beside_siblings(gateway: Gateway, place: ProcessPlace, stop: asyncio.Event) -> AsyncIterator[None]:
    """Answers the other processes while it is open, and sets ``stop`` when the supervisor is gone."""
    loop = asyncio.get_running_loop()
    gateway.siblings = Siblings(place, gateway.metrics.render, gateway.tenancy.memory_receipts.find)
    await gateway.siblings.open()

    def on_input() -> None:
        # Nobody writes there, so it is the end.
        loop.remove_reader(0)
        stop.set()

    loop.add_reader(0, on_input)
    try:
        yield
    finally:
        loop.remove_reader(0)
        await gateway.siblings.close()


def bind(server: ServerSettings, *, is_shared: bool = False) -> socket.socket:
    """Takes the address before the models are loaded. Raises ``ConfigError`` where it cannot be had.

    ``is_shared``: other processes of the same user may take it as well, and the kernel shares connections out.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            server.host.strip("[]"), server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if is_shared:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(f"cannot listen on {server.host}:{server.port}: {error.strerror or error}") from error
    return listener


def server_config(settings: Settings, gateway: Gateway) -> uvicorn.Config:
    """uvicorn without its own logs and headers."""
    return uvicorn.Config(
        create_app(settings, gateway=gateway),
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_graceful_shutdown=math.ceil(settings.server.shutdown_grace_s) + FAREWELL_S,
    )


def quiet_signals(server: uvicorn.Server) -> uvicorn.Server:
    """Leaves signals to ``stopped_by_signals``: uvicorn would raise them again after a clean end."""
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    return server


@contextlib.contextmanager
def stopped_by_signals(stop: asyncio.Event) -> Iterator[None]:
    """Sets ``stop`` on SIGINT and SIGTERM while it is open."""
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, stop.set)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


@contextlib.asynccontextmanager
async def following(reloader: ConfigReloader, stop: asyncio.Event) -> AsyncIterator[None]:
    """Reads the configuration anew on SIGHUP and when its file changes, while it is open.

    A terminal that closes sends SIGHUP as well; ``stop`` is set then.
    """
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[Any]] = {asyncio.create_task(reloader.watch())}
    terminal = Terminal()

    def on_hangup() -> None:
        if terminal.is_closed:
            stop.set()
            return
        task = asyncio.create_task(reloader.reload("sighup"))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    loop.add_signal_handler(signal.SIGHUP, on_hangup)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def precision(info: ModelInfo) -> str:
    """In which numbers a model is served, and what the regression gate says where they are quantized."""
    parts = [info.dtype]
    if info.quantization != "none":
        parts.append(f"{info.quantization} weights")
    if info.kv_cache_dtype != "auto":
        parts.append(f"{info.kv_cache_dtype} KV cache")
    if info.quantization_gate != "none":
        parts.append(f"quantization gate {info.quantization_gate.replace('_', ', ')}")
    return ", ".join(parts)


def ready_line(gateway: Gateway, listener: socket.socket, source: str) -> str:
    """One line that says what is served and where."""
    host, port = listener.getsockname()[:2]
    info, names = gateway.backend.info, sorted(gateway.settings.tenants)
    shown = ", ".join(names[:MAX_TENANTS_SHOWN]) or "none"
    more = f" and {len(names) - MAX_TENANTS_SHOWN} more" if len(names) > MAX_TENANTS_SHOWN else ""
    where = f"[{host}]" if ":" in host else host
    model = gateway.served_model
    return (
        f"firsttoken {VERSION} ready on http://{where}:{port} | "
        f"model {model.name} ({model.own_name}, {precision(info)}, {info.attention_backend} attention, "
        f"window {info.max_model_len} tokens) | encoder {gateway.encoder_state} | "
        f"tenants {shown}{more} | {source}"
    )
