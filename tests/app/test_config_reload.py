"""Reading the configuration anew: what holds from the next request on, what waits, and what a bad file leaves alone."""

import asyncio
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
from factories_app import EchoBackend, bearer, make_body, make_documents
from factories_config import ADMIN, ConfigFile, config_toml, following_gateway, tenant_toml
from factories_storage import digest_of
from structlog.testing import capture_logs

from app.settings import ReloadSettings

CHAT = "/v1/chat/completions"
ACME, INITECH = "sk-acme-own", "sk-initech-own"


async def status_of(http: httpx.AsyncClient) -> dict[str, Any]:
    answer = await http.get("/admin/v1/config", headers=ADMIN)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def ask(http: httpx.AsyncClient, key: str = ACME, **fields: Any) -> Any:
    return await http.post(CHAT, json=make_body(**fields), headers=bearer(key))


async def metric(http: httpx.AsyncClient, name: str) -> float:
    lines = (await http.get("/metrics")).text.splitlines()
    return float(next(line.rpartition(" ")[2] for line in lines if line.startswith(f"{name} ")))


async def test_tenants_keys_and_limits_of_the_new_file_hold_from_the_next_request_on(tmp_path: Path) -> None:
    file = ConfigFile(tmp_path, config_toml(tenant_toml("acme", ACME)))
    async with following_gateway(file) as (http, reloader, _):
        before = [(await ask(http, key)).status_code for key in (ACME, INITECH)]
        file.write(config_toml(tenant_toml("initech", INITECH, requests_per_minute=1)))
        assert await reloader.reload("sighup") == "applied"
        after = [(await ask(http, key)).status_code for key in (ACME, INITECH, INITECH)]
    assert (before, after) == ([200, 401], [401, 200, 429])


async def test_what_was_used_of_a_budget_is_not_forgotten(tmp_path: Path) -> None:
    file = ConfigFile(tmp_path, config_toml(tenant_toml("acme", ACME, requests_per_minute=3, tokens_per_day=10_000)))
    async with following_gateway(file) as (http, reloader, gateway):
        for _ in range(2):
            await ask(http)
        principal = gateway.authenticator.authenticate(bearer(ACME)["Authorization"])
        used = 10_000 - ((await gateway.admission.remaining(principal)).tokens or 0)
        file.write(config_toml(tenant_toml("acme", ACME, requests_per_minute=2, tokens_per_day=9_000)))
        await reloader.reload("sighup")
        principal = gateway.authenticator.authenticate(bearer(ACME)["Authorization"])
        left = (await gateway.admission.remaining(principal)).tokens
        refused = await ask(http)
    assert used > 0
    assert left == 9_000 - used
    assert refused.status_code == 429
    assert "requests per minute: limit 2, used 2" in refused.json()["error"]["message"]


async def test_a_request_that_runs_keeps_the_snapshot_it_began_with(tmp_path: Path) -> None:
    file = ConfigFile(tmp_path, config_toml(tenant_toml("acme", ACME), "[limits]\ndefault_max_tokens = 9\n"))
    backend = EchoBackend(reply=" ".join(["word"] * 50), step_s=0.02)
    async with following_gateway(file, backend) as (http, reloader, _):
        running = asyncio.create_task(ask(http))
        while backend.num_running == 0:
            await asyncio.sleep(0.005)
        file.write(config_toml(tenant_toml("acme", ACME), "[limits]\ndefault_max_tokens = 2\n"))
        await reloader.reload("sighup")
        assert not running.done()
        old, new = await running, await ask(http)
    assert [answer.json()["usage"]["completion_tokens"] for answer in (old, new)] == [9, 2]


async def test_the_body_is_read_and_answered_under_the_snapshot_of_its_head(tmp_path: Path) -> None:
    """The key and the policy are gone before the body has come; the request began with both."""
    file = ConfigFile(
        tmp_path, config_toml(tenant_toml("acme", ACME, policy="tight"), "[policies.tight]\nmax_input_tokens = 900\n")
    )
    async with following_gateway(file) as (_, reloader, gateway):
        snapshot = gateway.config.current
        file.write(config_toml(tenant_toml("initech", INITECH)))
        await reloader.reload("sighup")
        principal = await gateway.directory.authenticate(bearer(ACME)["Authorization"], snapshot.authenticator)
        policy = snapshot.policies.get(principal.tenant.policy)
        assert gateway.config.current.policies.get("tight") is None
    assert policy is not None
    assert policy.settings.max_input_tokens == 900


async def test_policies_and_the_reducer_change(tmp_path: Path) -> None:
    file = ConfigFile(tmp_path, config_toml(tenant_toml("acme", ACME)))
    documents = make_documents(6)
    async with following_gateway(file) as (http, reloader, _):
        body = make_body(documents=documents, firsttoken={"policy": "tight"})
        unknown = await http.post("/v1/compact", json=body, headers=bearer(ACME))
        plain = await http.post("/v1/compact", json=make_body(documents=documents), headers=bearer(ACME))
        file.write(
            config_toml(
                tenant_toml("acme", ACME),
                "[reducer]\nmin_prompt_tokens = 100000\n[policies.tight]\nmax_input_tokens = 300\n",
            )
        )
        await reloader.reload("sighup")
        tight = await http.post("/v1/compact", json=body, headers=bearer(ACME))
        passed = await http.post("/v1/compact", json=make_body(documents=documents), headers=bearer(ACME))
    assert unknown.status_code == 400
    assert tight.json()["budget"] == {"max_input_tokens": 300, "source": "policy"}
    assert len(plain.json()["stages"]) > 1
    assert [stage["stage"] for stage in passed.json()["stages"]] == ["access"]


@pytest.mark.parametrize(
    ("text", "key", "hint"),
    [
        ("[tenants.acme]\nrequests_per_minut = 3\n", "tenants.acme.requests_per_minut", "'requests_per_minute'"),
        ("[server]\nmax_body_bytes = -1\n", "server.max_body_bytes", None),
        ("[limits]\ndefault_max_tokens = 'many'\n", "limits.default_max_tokens", None),
        ("[tenants.acme]\npolicy = 'x'\n", "tenants.acme.policy", None),
        ("[server\n", None, None),
    ],
)
async def test_a_bad_file_keeps_the_last_good_one_and_is_reported(
    tmp_path: Path, text: str, key: str | None, hint: str | None
) -> None:
    file = ConfigFile(tmp_path, config_toml(tenant_toml("acme", ACME)))
    good = file.digest
    async with following_gateway(file) as (http, reloader, _):
        file.write(text)
        with capture_logs() as logs:
            assert await reloader.reload("file") == "failed"
        status, answer = await status_of(http), await ask(http)
        figures = [
            await metric(http, name)
            for name in (
                'firsttoken_config_reloads_total{outcome="failed"}',
                "firsttoken_config_last_reload_successful",
                "firsttoken_config_last_reload_success_timestamp_seconds",
            )
        ]
        file.write(config_toml(tenant_toml("acme", ACME)))
        assert await reloader.reload("file") == "unchanged"
        healed = await status_of(http)
    assert answer.status_code == 200
    assert (status["state"], status["digest"], status["source"]) == ("failed", good, str(file.path))
    failure = status["last_failure"]
    assert (failure["key"], failure["trigger"]) == (key, "file")
    assert str(file.path) in failure["message"]
    assert hint is None or hint in failure["hint"]
    assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == ["config_reload_failed"]
    assert figures[:2] == [1.0, 0.0]
    assert figures[2] == pytest.approx(status["loaded_at"])
    assert (healed["state"], healed["last_failure"]["key"]) == ("current", key)


async def test_a_missing_file_keeps_the_last_good_one(tmp_path: Path) -> None:
    file = ConfigFile(tmp_path, config_toml(tenant_toml("acme", ACME)))
    async with following_gateway(file) as (http, reloader, _):
        file.path.unlink()
        assert await reloader.reload("sighup") == "failed"
        assert (await ask(http)).status_code == 200
        assert "cannot be read" in (await status_of(http))["last_failure"]["message"]


@pytest.mark.parametrize("text", ["", "# nothing but a comment\n"])
async def test_an_empty_file_keeps_the_last_good_one(tmp_path: Path, text: str) -> None:
    file = ConfigFile(tmp_path, config_toml(tenant_toml("acme", ACME)))
    async with following_gateway(file) as (http, reloader, _):
        file.path.write_text(text)
        assert await reloader.reload("sighup") == "failed"
        assert (await ask(http)).status_code == 200
        assert "holds nothing" in (await status_of(http))["last_failure"]["message"]


async def test_a_byte_order_mark_before_the_file_is_no_part_of_it(tmp_path: Path) -> None:
    file = ConfigFile(tmp_path, config_toml(tenant_toml("acme", ACME)))
    async with following_gateway(file) as (_, reloader, _):
        file.path.write_bytes(b"\xef\xbb\xbf" + file.path.read_bytes())
        assert await reloader.reload("sighup") == "unchanged"


async def test_a_pipe_in_place_of_the_file_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    file = ConfigFile(tmp_path, config_toml(tenant_toml("acme", ACME)))
    async with following_gateway(file) as (http, reloader, _):
        file.path.unlink()
        os.mkfifo(file.path)
        assert await asyncio.wait_for(reloader.reload("sighup"), timeout=30) == "failed"
        assert "not a regular file" in (await status_of(http))["last_failure"]["message"]


async def test_keys_that_need_a_restart_stay_and_are_named_and_the_others_are_applied(tmp_path: Path) -> None:
    file = ConfigFile(tmp_path, config_toml(tenant_toml("acme", ACME)))
    async with following_gateway(file) as (http, reloader, gateway):
        file.write(
            config_toml(
                tenant_toml("initech", INITECH),
                '[engine.model]\nmodel = "other"\n[reducer.encoder]\nmax_batch_tokens = 9\n',
                server="port = 9001",
            )
        )
        with capture_logs() as logs:
            assert await reloader.reload("sighup") == "partial"
        status = await status_of(http)
        answers = [(await ask(http, key)).status_code for key in (ACME, INITECH)]
        waiting = await metric(http, "firsttoken_config_keys_need_restart")
        settings = gateway.settings
    keys = ["server.port", "engine.model.model", "reducer.encoder.max_batch_tokens"]
    assert answers == [401, 200]
    assert (status["state"], status["needs_restart"], status["generation"]) == ("restart_needed", keys, 2)
    assert waiting == 3.0
    assert (settings.server.port, settings.reducer.encoder.max_batch_tokens) == (0, 1024)
    assert list(next(entry["keys"] for entry in logs if entry["event"] == "config_needs_restart")) == keys


async def test_live_keys_that_do_not_go_with_those_that_wait_are_refused(tmp_path: Path) -> None:
    """Demo keys need a loopback address; the new one is, the one in force is not."""
    file = ConfigFile(tmp_path, config_toml(tenant_toml("acme", ACME), server='host = "0.0.0.0"'))
    async with following_gateway(file) as (http, reloader, _):
        file.write(config_toml(tenant_toml("acme", "sk-acme-demo"), server='host = "127.0.0.1"'))
        assert await reloader.reload("sighup") == "failed"
        message = (await status_of(http))["last_failure"]["message"]
        assert (await ask(http)).status_code == 200
    assert "only accepted on loopback" in message
    assert "as long as no restart applies server.host" in message


async def test_the_database_s_tenants_stay_and_their_names_are_refused_in_the_file(tmp_path: Path) -> None:
    storage = f'data_folder = "{tmp_path / "data"}"\nkey_cache_s = 60.0'
    file = ConfigFile(tmp_path, config_toml(tenant_toml("acme", ACME), storage=storage))
    async with following_gateway(file) as (http, reloader, _):
        await http.post("/admin/v1/tenants", json={"name": "stored"}, headers=ADMIN)
        key = (await http.post("/admin/v1/tenants/stored/keys", json={"name": "k"}, headers=ADMIN)).json()["key"]
        await http.put("/admin/v1/policies/lean", json={"settings": {"max_input_tokens": 700}}, headers=ADMIN)
        file.write(config_toml(storage=storage))
        assert await reloader.reload("sighup") == "applied"
        answers = [
            (await ask(http, key, firsttoken={"policy": "lean"})).status_code,
            (await ask(http, ACME)).status_code,
        ]
        file.write(config_toml(tenant_toml("stored", INITECH), storage=storage))
        clash = await reloader.reload("sighup"), (await status_of(http))["last_failure"]["key"]
        file.write(config_toml("[policies.lean]\nmax_input_tokens = 1\n", storage=storage))
        taken = await reloader.reload("sighup"), (await status_of(http))["last_failure"]["key"]
        listed = [tenant["name"] for tenant in (await http.get("/admin/v1/tenants", headers=ADMIN)).json()["data"]]
    assert answers == [200, 401]
    assert clash == ("failed", "tenants.stored")
    assert taken == ("failed", "policies.lean")
    assert listed == ["stored"]


async def test_admin_keys_receipt_limits_and_the_log_level_change(tmp_path: Path) -> None:
    file = ConfigFile(tmp_path, config_toml(tenant_toml("acme", ACME)))
    async with following_gateway(file) as (http, reloader, gateway):
        for _ in range(3):
            await ask(http)
        text = config_toml(tenant_toml("acme", ACME), "[receipts]\nmax_entries_per_tenant = 1\n")
        file.write(text.replace(digest_of("sk-admin-of-tests"), digest_of("sk-other-admin")))
        await reloader.reload("sighup")
        answers = [
            (await http.get("/admin/v1/config", headers=bearer(key))).status_code
            for key in ("sk-admin-of-tests", "sk-other-admin", ACME)
        ]
        kept = len(gateway.tenancy.memory_receipts)
    assert answers == [401, 200, 403]
    assert kept == 1


async def test_the_watch_reads_a_changed_file_once_it_has_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = ConfigFile(tmp_path, config_toml(tenant_toml("acme", ACME), "[reload]\ninterval_s = 0.02\n"))
    async with following_gateway(file) as (http, reloader, gateway):
        watching = asyncio.create_task(reloader.watch())
        try:
            file.write(config_toml(tenant_toml("initech", INITECH), "[reload]\ninterval_s = 0.02\n"))
            await until(lambda: "initech" in gateway.settings.tenants)
            assert (await status_of(http))["trigger"] == "file"
            file.write("[reload]\ninterval_s = 0.02\nwatch = maybe\n")
            await until(lambda: gateway.reloads.status.state == "failed")
            await asyncio.sleep(0.2)
            assert gateway.reloads.num_reloads["failed"] == 1, "a bad file is read once, not at every look"
            file.write(config_toml("[reload]\ninterval_s = 0.02\nwatch = false\n"))
            await until(lambda: not gateway.settings.reload.watch)
            file.write(config_toml(tenant_toml("acme", ACME)))
            await asyncio.sleep(0.2)
            assert gateway.settings.tenants == {}
        finally:
            watching.cancel()


async def until(condition: Any, limit_s: float = 10.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.01)


def test_the_watch_needs_an_interval() -> None:
    for interval_s in (0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="interval_s must be positive"):
            ReloadSettings(interval_s=interval_s)
    with pytest.raises(ValueError, match=r"at most 86400.0, got 1e\+300"):
        ReloadSettings(interval_s=1e300)
