"""Replicas that come and go while the gateway runs."""

import asyncio
from pathlib import Path

import pytest
from factories_app import bearer, make_body
from factories_config import ConfigFile, config_toml, following_gateway, tenant_toml
from factories_upstream import MODEL, Upstream, make_backend, running_upstream

from app.backend_settings import BackendSettings, ReplicaSettings
from app.backends.openai import OpenAIBackend
from app.config_file import read_config
from app.errors import ConfigError
from app.workers import WorkerPool

ACME = "sk-acme-own"


def settings_of(*urls: str, key: str | None = None, **changes: object) -> BackendSettings:
    replicas = tuple(ReplicaSettings(url=url, api_key_env=key) for url in urls)
    return make_backend(replicas=replicas, **changes)


def make(*urls: str) -> OpenAIBackend:
    return OpenAIBackend(settings_of(*urls), WorkerPool(1, 8))


def test_a_replica_that_stays_keeps_its_state_and_its_requests() -> None:
    backend = make("http://a:1/v1", "http://b:1/v1")
    held = backend.replicas
    a, b = backend.replicas
    a.begin()
    for _ in range(3):
        b.fail("down")
    backend.use(settings_of("http://b:1/v1/", "http://c:1/v1", "http://a:1/v1", failure_threshold=9))
    assert held is backend.replicas, "metrics hold the list"
    assert [replica.name for replica in held] == ["b:1", "c:1", "a:1"]
    assert (held[0] is b, held[2] is a) == (True, True)
    assert (b.state, a.num_running, a.policy.failure_threshold) == ("open", 1, 9)


def test_a_replica_that_is_gone_ends_what_it_computes() -> None:
    backend = make("http://a:1/v1", "http://b:1/v1")
    gone = backend.replicas[0]
    gone.begin()
    backend.use(settings_of("http://b:1/v1"))
    assert [replica.name for replica in backend.replicas] == ["b:1"]
    assert {backend._ring.choose(bytes([n])) for n in range(50)} == {backend.replicas[0]}
    gone.end()
    assert gone.num_running == 0


def test_a_key_that_is_not_set_is_refused_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, wanted = make("http://a:1/v1"), settings_of("http://b:1/v1", key="FT_TEST_KEY")
    monkeypatch.delenv("FT_TEST_KEY", raising=False)
    with pytest.raises(ConfigError, match="FT_TEST_KEY of b:1 is not set") as caught:
        backend.check(wanted)
    assert caught.value.key == "backend.replicas"
    monkeypatch.setenv("FT_TEST_KEY", "sk")
    backend.check(wanted)


def file_text(*upstreams: Upstream, interval_s: float = 0.0, key: str = "") -> str:
    lines = [f'[backend]\nkind = "openai"\nmodel = "{MODEL}"\nmax_model_len = 32768\nhealth_interval_s = {interval_s}']
    lines += ["failure_threshold = 1\nopen_s = 0.05"]
    lines += [f'[[backend.replicas]]\nurl = "{upstream.url}/v1"\n{key}' for upstream in upstreams]
    return config_toml(tenant_toml("acme", ACME), "\n".join(lines) + "\n")


async def test_a_reload_sends_requests_to_the_new_replica_and_starts_health_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_upstream() as first, running_upstream() as second:
        file = ConfigFile(tmp_path, file_text(first))
        backend = OpenAIBackend(read_config(file.path, {}).settings.backend, WorkerPool(2, 8))
        async with following_gateway(file, backend) as (http, reloader, gateway):
            assert (await http.post("/v1/chat/completions", json=make_body(), headers=bearer(ACME))).status_code == 200
            monkeypatch.delenv("FT_TEST_KEY", raising=False)
            file.write(file_text(second, key='api_key_env = "FT_TEST_KEY"'))
            assert await reloader.reload("sighup") == "failed"
            failure = gateway.reloads.status.last_failure
            assert failure is not None
            assert failure.key == "backend.replicas"
            assert [replica.url for replica in backend.replicas] == [f"{first.url}/v1"]
            file.write(file_text(second, interval_s=0.05))
            assert await reloader.reload("sighup") == "applied"
            assert (await http.post("/v1/chat/completions", json=make_body(), headers=bearer(ACME))).status_code == 200
            assert (len(first.log()), len(second.log())) == (1, 1)
            second.kill()
            async with asyncio.timeout(10):
                while backend.replicas[0].state == "closed":  # only a health check can have noticed
                    await asyncio.sleep(0.02)
