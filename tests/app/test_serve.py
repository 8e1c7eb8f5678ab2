"""Serving until a signal: running requests get the grace time, then an error that says why they end."""

import asyncio
import contextlib
import logging
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import pytest
from click.testing import CliRunner
from factories_app import EchoBackend, bearer, make_body, make_settings
from factories_quantization import save_tiny_llama
from structlog.testing import capture_logs

from app.cli import main
from app.commands.serve import precision, run_gateway, with_precision
from app.gateway import Gateway, make_gateway
from app.settings import ServerSettings
from engine.config import EngineConfig, ModelConfig

URL = "/v1/chat/completions"


@contextlib.asynccontextmanager
async def serving(
    gateway: Gateway, capsys: pytest.CaptureFixture[str]
) -> AsyncIterator[tuple[httpx.AsyncClient, "asyncio.Task[None]"]]:
    """``firsttoken serve`` in this loop: a client of it, and the task that ends when it does."""
    task, output = asyncio.create_task(run_gateway(gateway, "test")), ""
    async with asyncio.timeout(20):
        while (address := re.search(r"ready on (http://\S+)", output)) is None:
            await asyncio.sleep(0.02)
            output += capsys.readouterr().out
    async with httpx.AsyncClient(base_url=address[1], headers=bearer(), timeout=20) as http:
        try:
            yield http, task
        finally:
            if not task.done():
                os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(task, 20)


def make_slow_gateway(*, grace_s: float, step_s: float) -> tuple[Gateway, EchoBackend]:
    """An engine that would answer for many times as long as the grace time."""
    backend = EchoBackend(reply=" ".join(["word"] * 2000), step_s=step_s)
    settings = make_settings(
        server=ServerSettings(port=0, shutdown_grace_s=grace_s), acme={"tokens_per_day": 1_000_000}
    )
    return make_gateway(settings, backend), backend


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the server logged as an error."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_stream_longer_than_the_grace_time_ends_with_an_error_frame(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    gateway, backend = make_slow_gateway(grace_s=0.5, step_s=0.02)
    frames: list[bytes] = []
    async with serving(gateway, capsys) as (http, task):
        async with http.stream("POST", URL, json=make_body(stream=True)) as response:
            started = time.monotonic()
            async for line in response.aiter_lines():  # raises where the response is cut
                if line:
                    frames.append(line.removeprefix("data: ").encode())
                if len(frames) == 3:
                    os.kill(os.getpid(), signal.SIGTERM)
        assert time.monotonic() - started >= 0.5
        await asyncio.wait_for(task, 5)
    *chunks, last = [msgspec.json.decode(frame) for frame in frames]
    assert last == {
        "error": {
            "message": "The server is shutting down; retry later.",
            "type": "overloaded",
            "param": None,
            "code": None,
        }
    }
    assert len(chunks) > 5
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert (len(backend.aborted), backend.num_running) == (1, 0)
    assert complaints(caplog) == []


async def test_what_has_no_answer_yet_is_503_after_the_grace_time(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    gateway, backend = make_slow_gateway(grace_s=0.2, step_s=30.0)
    async with serving(gateway, capsys) as (http, task):
        waiting = [asyncio.ensure_future(http.post(URL, json=make_body(stream=stream))) for stream in (False, True)]
        while backend.num_running < 2:
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        answers = await asyncio.wait_for(asyncio.gather(*waiting), 5)
        await asyncio.wait_for(task, 5)
    for answer in answers:
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "The server is shutting down; retry later."
        assert int(answer.headers["retry-after"]) >= 1
    principal = gateway.authenticator.authenticate(bearer()["Authorization"])
    assert (await gateway.admission.remaining(principal)).tokens == 1_000_000
    assert complaints(caplog) == []


async def test_a_stream_that_ends_within_the_grace_time_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    backend = EchoBackend(reply="a b c d e f", step_s=0.05)
    gateway = make_gateway(make_settings(server=ServerSettings(port=0, shutdown_grace_s=10)), backend)
    async with serving(gateway, capsys) as (http, task):
        async with http.stream("POST", URL, json=make_body(stream=True)) as response:
            lines = []
            async for line in response.aiter_lines():
                lines += [line] if line else []
                if len(lines) == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(task, 5)
    assert lines[-1] == "data: [DONE]"
    assert '"finish_reason":"stop"' in lines[-2]


async def test_a_client_that_takes_nothing_does_not_hold_the_end_up(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    gateway, backend = make_slow_gateway(grace_s=0.2, step_s=0.0)
    backend.reply = " ".join(["word" * 20_000] * 500)
    with capture_logs() as logs:
        async with serving(gateway, capsys) as (http, task):
            await take_nothing(http, task)
    assert backend.num_running == 0
    assert [entry["event"] for entry in logs if entry["log_level"] == "warning"] == ["stream_stuck_at_shutdown"]
    assert not any("Exception in ASGI application" in line for line in complaints(caplog))


async def take_nothing(http: httpx.AsyncClient, task: "asyncio.Task[None]") -> None:
    """Asks for a stream, reads its first line only, and stops the server."""
    body = msgspec.json.encode(make_body(stream=True))
    reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port, limit=1024)
    head = f"POST {URL} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    writer.write(f"{head}Authorization: {bearer()['Authorization']}\r\n\r\n".encode() + body)
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    os.kill(os.getpid(), signal.SIGTERM)
    started = time.monotonic()
    await asyncio.wait_for(task, 10)
    assert time.monotonic() - started < 30
    writer.close()


async def test_precision_and_a_forced_format_are_told_at_start_and_in_the_models(
    capsys: pytest.CaptureFixture[str],
) -> None:
    backend = EchoBackend()
    backend.info = msgspec.structs.replace(
        backend.info,
        dtype="bf16",
        quantization="int8",
        kv_cache_dtype="fp8",
        quantization_gate="forced_failed",
    )
    assert precision(backend.info) == "bf16, int8 weights, fp8 KV cache, quantization gate forced, failed"
    gateway = make_gateway(make_settings(server=ServerSettings(port=0)), backend)
    async with serving(gateway, capsys) as (http, _):
        cards = (await http.get("/v1/models")).json()["data"]
    told = [(card["quantization"], card["kv_cache_dtype"], card["quantization_gate"]) for card in cards]
    assert set(told) == {("int8", "fp8", "forced_failed")}


def test_options_of_serve_go_before_the_configuration() -> None:
    settings = make_settings(engine=EngineConfig(model=ModelConfig(dtype="fp32", quantization="int8")))
    assert with_precision(settings) == settings
    changed = with_precision(settings, dtype="bf16", kv_cache_dtype="int8", force_quantization=True).engine
    assert (changed.model.dtype, changed.model.quantization) == ("bf16", "int8")
    assert (changed.cache.kv_cache_dtype, changed.model.force_quantization) == ("int8", True)


def test_serve_refuses_a_quantized_format_without_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIRSTTOKEN_CACHE", str(tmp_path / "cache"))
    model = save_tiny_llama(tmp_path / "tiny")
    config = tmp_path / "firsttoken.toml"
    config.write_text(
        f'[server]\nport = 0\n[engine.model]\nmodel = "{model}"\ndtype = "fp32"\n[encoder]\nenabled = false\n'
    )
    with capture_logs():
        result = CliRunner().invoke(main, ["serve", "--config", str(config), "--kv-cache-dtype", "int8"])
    assert result.exit_code == 1
    assert "quantization none+kv_int8 of tiny in fp32 has not been measured" in result.output
    assert "--force-quantization" in result.output
