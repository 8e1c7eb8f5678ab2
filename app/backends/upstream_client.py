"""Sends one request to one replica and reads its answer; knows HTTP, nothing of prompts."""

import asyncio
import io
import math
import os
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
from yarl import URL

from app.backend_settings import BackendSettings, ReplicaSettings
from app.backends.event_stream import EventParser, ServerEvent
from app.backends.upstream_errors import upstream_refusal
from app.errors import ConfigError, UpstreamError

MAX_ERROR_BYTES = 64 * 1024
MAX_ANSWER_BYTES = 256 * 1024 * 1024
HEALTH_TIMEOUT_S = 5.0
KEEPALIVE_S = 60.0
MAX_HEADER_BYTES = 64 * 1024
LARGE_BODY_BYTES = 512 * 1024
"""A larger body is written piece by piece, so that other requests are served in between."""
END_TIMEOUT_S = 0.5
"""How long the end of a stream may take after its ``[DONE]``, so that its connection can be used again."""
_LEFT = (aiohttp.ClientError, OSError)


class UnreachableError(Exception):
    """The connection failed before an answer began; another try may succeed."""


class SilentError(Exception):
    """Nothing came for as long as one may wait."""


class UpstreamResponse:
    """An answer that has begun: read ``next_events`` or ``body``; always ``aclose``."""

    def __init__(self, response: aiohttp.ClientResponse, ending: set[asyncio.Task[None]]) -> None:
        """``ending`` keeps what is read after the answer was let go of."""
        self._response = response
        self._content = response.content
        self._parser = EventParser()
        self._ending = ending
        self.is_done = False
        """Set by a reader of events that has seen the last one that counts."""
        self._silence = _SilenceLimit(response.content)

    def limit_silence(self, limit_s: float) -> None:
        """From now on ``next_events`` waits ``limit_s`` seconds at most."""
        self._silence.start(limit_s)

    async def body(self) -> bytes:
        """The whole answer. Raises ``UnreachableError`` where it breaks off, ``UpstreamError`` where it is too long."""
        pieces: list[bytes] = []
        num_bytes = 0
        try:
            while piece := await self._content.readany():
                num_bytes += len(piece)
                if num_bytes > MAX_ANSWER_BYTES:
                    text = f"The upstream's answer is longer than {MAX_ANSWER_BYTES} bytes."
                    raise UpstreamError(text, status=502, type="server_error")
                pieces.append(piece)
        except _LEFT as error:
            raise UnreachableError(_reason(error)) from error
        return b"".join(pieces)

    async def next_events(self) -> list[ServerEvent]:
        """The events that have come since the last call, at least one; empty at the end of the stream.

        Raises ``UnreachableError`` where the stream breaks off, ``SilentError`` at the limit.
        """
        self._silence.begin_wait()
        try:
            while piece := await self._content.readany():
                if events := self._parser.feed(piece):
                    return events
        except (*_LEFT, ValueError) as error:
            raise UnreachableError(_reason(error)) from error
        finally:
            self._silence.end_wait()
        return []

    def close(self) -> None:
        """Gives the connection back, or closes it where the answer has not ended: the upstream stops computing."""
        self._silence.stop()
        if self.is_done and not self._content.at_eof():
            task = asyncio.get_running_loop().create_task(self._read_end())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        else:
            self._release()

    async def _read_end(self) -> None:
        """The last event and the end of the body are often two packets, and the second one comes in a moment."""
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                while await self._content.readany():
                    pass
        except (*_LEFT, TimeoutError):
            pass
        finally:
            self._release()

    def _release(self) -> None:
        if self._content.at_eof():
            self._response.release()
        else:
            self._response.close()


class _SilenceLimit:
    """Ends a wait for a stream's next event with ``SilentError``.

    One timer for the whole stream, moved only when it rings: a time-out of its own would cost each token of a stream as
    much as all that is done to its text.
    """

    __slots__ = ("_content", "_limit_s", "_loop", "_timer", "_waits_since")

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content
        self._loop = asyncio.get_running_loop()
        self._limit_s = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._waits_since: float | None = None

    def start(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._timer = self._loop.call_later(limit_s, self._look)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def begin_wait(self) -> None:
        self._waits_since = self._loop.time()

    def end_wait(self) -> None:
        self._waits_since = None

    def _look(self) -> None:
        """At the limit, if the wait of now has lasted since the timer was set; else the timer is set for its end."""
        now = self._loop.time()
        end = (now if self._waits_since is None else self._waits_since) + self._limit_s
        if end <= now:
            self._content.set_exception(SilentError())
        else:
            self._timer = self._loop.call_at(end, self._look)


class UpstreamClient:
    """Connections to all replicas, kept open between requests. Made on the event loop that uses it."""

    def __init__(self, settings: BackendSettings) -> None:
        self._settings = settings
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=settings.max_connections, keepalive_timeout=KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, connect=settings.connect_timeout_s),
            # Only what the configuration names: neither proxies nor .netrc of the process's user, and no cookies.
            trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            max_field_size=MAX_HEADER_BYTES,
        )
        self._headers = {replica.url.rstrip("/"): replica_headers(replica) for replica in settings.replicas}
        self._urls: dict[str, URL] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def use(self, settings: BackendSettings) -> None:
        """Takes other replicas and fields; connections stay. Raises ``ConfigError`` where a key is not set."""
        # Those of replicas that are gone stay as well: a request may be on its way to one.
        headers = {replica.url.rstrip("/"): replica_headers(replica) for replica in settings.replicas}
        self._headers = self._headers | headers
        self._settings = settings

    async def aclose(self) -> None:
        """Closes all connections."""
        for task in self._ending:
            task.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)
        await self._session.close()

    async def send(
        self,
        replica_url: str,
        body: bytes,
        *,
        request_id: str,
        cache_salt: str,
        path: str = "/chat/completions",
        trace_headers: Mapping[str, str] = MappingProxyType({}),
    ) -> UpstreamResponse:
        """Sends a request; returns when the answer begins.

        Raises ``UpstreamError`` for a refusal, ``UnreachableError`` where nothing was answered.
        """
        headers = {**trace_headers, **self._headers[replica_url], "x-request-id": request_id}
        if self._settings.salt_header is not None:
            headers[self._settings.salt_header] = cache_salt
        data = io.BytesIO(body) if len(body) > LARGE_BODY_BYTES else body
        try:
            response = await self._session.post(
                self._url(f"{replica_url}{path}"), data=data, headers=headers, allow_redirects=False
            )
        except (*_LEFT, TimeoutError) as error:
            # Our own limits are cancellations here, so a time-out is one of the connection.
            raise UnreachableError(_reason(error)) from error
        if response.status == 200:
            return UpstreamResponse(response, self._ending)
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                told = await _beginning(response.content)
        except (*_LEFT, TimeoutError):
            told = b""
        finally:
            response.release()
        refusal = upstream_refusal(response.status, told, response.headers.get("retry-after"), time.time())
        refusal.upstream_status = response.status
        raise refusal

    async def is_healthy(self, replica_url: str) -> bool:
        """Whether the replica answers its health check with 200."""
        path = self._settings.health_path or (None if self._settings.flavour == "openai" else "/health")
        if path is None:
            url = f"{replica_url}/models"
        else:
            parts = urlsplit(replica_url)
            url = f"{parts.scheme}://{parts.netloc}{path}"
        answer = await self._get(url, self._headers[replica_url])
        return answer is not None and answer[0] == 200

    async def max_model_len(self, replica_url: str) -> int | None:
        """The window that the replica tells for the model, if it does."""
        answer = await self._get(f"{replica_url}/models", self._headers[replica_url])
        if answer is None or answer[0] != 200:
            return None
        try:
            cards = msgspec.json.decode(answer[1]).get("data", ())
        except (msgspec.MsgspecError, AttributeError):
            return None
        for card in cards:
            if isinstance(card, dict) and card.get("id") == self._settings.model:
                window = card.get("max_model_len")
                return window if isinstance(window, int) and window > 1 else None
        return None

    async def _get(self, url: str, headers: dict[str, str]) -> tuple[int, bytes] | None:
        """Status and body; ``None`` where none comes in time."""
        timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
        try:
            async with self._session.get(
                self._url(url), headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                return response.status, await response.read()
        except (*_LEFT, TimeoutError):
            return None

    def _url(self, url: str) -> URL:
        """An address of the configuration, read once."""
        known = self._urls.get(url)
        if known is None:
            known = self._urls[url] = URL(url)
        return known


def replica_headers(replica: ReplicaSettings) -> dict[str, str]:
    """Headers of every request to a replica. Raises ``ConfigError`` where its key is not set."""
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if replica.api_key_env is not None:
        key = os.environ.get(replica.api_key_env, "").strip()
        if not key:
            text = f"backend.replicas: {replica.api_key_env} of {replica.name} is not set"
            raise ConfigError(text, key="backend.replicas")
        headers["Authorization"] = f"Bearer {key}"
    return headers


async def _beginning(content: Any) -> bytes:
    found = b""
    while len(found) <= MAX_ERROR_BYTES and (piece := await content.readany()):
        found += piece
    return found[:MAX_ERROR_BYTES]


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}{': ' + str(error) if str(error) else ''}"
