"""Sends one request to one replica and reads its answer; knows HTTP, nothing of prompts."""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from urllib.parse import urlsplit

import httpx

from app.backend_settings import BackendSettings, ReplicaSettings
from app.backends.event_stream import EventParser, ServerEvent
from app.backends.upstream_errors import upstream_refusal
from app.errors import ConfigError, UpstreamError

MAX_ERROR_BYTES = 64 * 1024
MAX_ANSWER_BYTES = 256 * 1024 * 1024
HEALTH_TIMEOUT_S = 5.0


class UnreachableError(Exception):
    """The connection failed before an answer began; another try may succeed."""


class UpstreamResponse:
    """An answer that has begun: read ``events`` or ``body``; always ``aclose``."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response

    async def body(self) -> bytes:
        """The whole answer. Raises ``UnreachableError`` where it breaks off, ``UpstreamError`` where it is too long."""
        pieces: list[bytes] = []
        num_bytes = 0
        try:
            async for piece in self._response.aiter_bytes():
                num_bytes += len(piece)
                if num_bytes > MAX_ANSWER_BYTES:
                    text = f"The upstream's answer is longer than {MAX_ANSWER_BYTES} bytes."
                    raise UpstreamError(text, status=502, type="server_error")
                pieces.append(piece)
        except httpx.HTTPError as error:
            raise UnreachableError(_reason(error)) from error
        return b"".join(pieces)

    async def events(self) -> AsyncGenerator[ServerEvent, None]:
        """Events as they come. Raises ``UnreachableError`` where the stream breaks off."""
        parser = EventParser()
        try:
            async for piece in self._response.aiter_bytes():
                for event in parser.feed(piece):
                    yield event
        except (httpx.HTTPError, ValueError) as error:
            raise UnreachableError(_reason(error)) from error

    async def aclose(self) -> None:
        """Gives the connection back, or closes it where the answer has not ended: the upstream stops computing."""
        await self._response.aclose()


class UpstreamClient:
    """Connections to all replicas, kept open between requests."""

    def __init__(self, settings: BackendSettings) -> None:
        self._settings = settings
        self._client = httpx.AsyncClient(
            # Only what the configuration names: neither proxies nor .netrc of the process's user.
            trust_env=False,
            limits=httpx.Limits(
                max_connections=settings.max_connections,
                max_keepalive_connections=settings.max_connections,
                keepalive_expiry=60.0,
            ),
            timeout=httpx.Timeout(None, connect=settings.connect_timeout_s, pool=settings.connect_timeout_s),
        )
        self._headers = {replica.url.rstrip("/"): self._make_headers(replica) for replica in settings.replicas}

    async def aclose(self) -> None:
        """Closes all connections."""
        await self._client.aclose()

    async def send(
        self, replica_url: str, body: bytes, *, request_id: str, cache_salt: str, path: str = "/chat/completions"
    ) -> UpstreamResponse:
        """Sends a request; returns when the answer begins.

        Raises ``UpstreamError`` for a refusal, ``UnreachableError`` where nothing was answered.
        """
        headers = {**self._headers[replica_url], "x-request-id": request_id}
        if self._settings.salt_header is not None:
            headers[self._settings.salt_header] = cache_salt
        request = self._client.build_request("POST", f"{replica_url}{path}", content=body, headers=headers)
        try:
            response = await self._client.send(request, stream=True)
        except httpx.HTTPError as error:
            raise UnreachableError(_reason(error)) from error
        if response.status_code == 200:
            return UpstreamResponse(response)
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                told = await _beginning(response.aiter_bytes())
        except (httpx.HTTPError, TimeoutError):
            told = b""
        finally:
            await response.aclose()
        refusal = upstream_refusal(response.status_code, told, response.headers.get("retry-after"), time.time())
        refusal.upstream_status = response.status_code
        raise refusal

    async def is_healthy(self, replica_url: str) -> bool:
        """Whether the replica answers its health check with 200."""
        path = self._settings.health_path or (None if self._settings.flavour == "openai" else "/health")
        if path is None:
            url = f"{replica_url}/models"
        else:
            parts = urlsplit(replica_url)
            url = f"{parts.scheme}://{parts.netloc}{path}"
        try:
            response = await self._client.get(url, headers=self._headers[replica_url], timeout=HEALTH_TIMEOUT_S)
        except httpx.HTTPError:
            return False
        return response.status_code == 200

    async def max_model_len(self, replica_url: str) -> int | None:
        """The window that the replica tells for the model, if it does."""
        headers = self._headers[replica_url]
        try:
            response = await self._client.get(f"{replica_url}/models", headers=headers, timeout=HEALTH_TIMEOUT_S)
            cards = response.json().get("data", ()) if response.status_code == 200 else ()
        except (httpx.HTTPError, ValueError, AttributeError):
            return None
        for card in cards:
            if isinstance(card, dict) and card.get("id") == self._settings.model:
                window = card.get("max_model_len")
                return window if isinstance(window, int) and window > 1 else None
        return None

    def _make_headers(self, replica: ReplicaSettings) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if replica.api_key_env is not None:
            key = os.environ.get(replica.api_key_env, "").strip()
            if not key:
                raise ConfigError(f"backend.replicas: {replica.api_key_env} of {replica.name} is not set")
            headers["Authorization"] = f"Bearer {key}"
        return headers


async def _beginning(pieces: AsyncIterator[bytes]) -> bytes:
    found = b""
    async with aclosing(pieces) as open_pieces:  # type: ignore[type-var]
        async for piece in open_pieces:
            found += piece
            if len(found) > MAX_ERROR_BYTES:
                break
    return found[:MAX_ERROR_BYTES]


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}{': ' + str(error) if str(error) else ''}"
