"""Settings: ranges, tenants, demo keys, policies."""

import msgspec
import pytest
from factories_app import GLOBEX_KEY, make_key, make_settings

from app.backend_settings import BackendSettings
from app.config_tree import struct_of
from app.errors import ConfigError
from app.operator_settings import CounterSettings, StorageSettings
from app.settings import PolicySettings, ServerSettings, Settings, TenantSettings


@pytest.mark.parametrize("tenant_id", ["", " ", "a b", "../x", "-x", "x" * 65])
def test_tenant_ids_that_name_nobody_or_are_no_plain_word_are_refused(tenant_id: str) -> None:
    with pytest.raises(ValueError, match="tenant id must be"):
        Settings(tenants={tenant_id: TenantSettings()})


def test_one_key_cannot_belong_to_two_tenants() -> None:
    tenant = TenantSettings(keys=(make_key("sk-shared"),))
    with pytest.raises(ValueError, match="'a' and 'b' have the same key"):
        Settings(tenants={"a": tenant, "b": tenant})


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.9.1"])
def test_demo_keys_are_accepted_on_loopback(host: str) -> None:
    assert make_settings(server=ServerSettings(host=host)).server.is_loopback


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "example.com"])
def test_demo_keys_are_refused_elsewhere(host: str) -> None:
    with pytest.raises(ValueError, match="only accepted on loopback"):
        make_settings(server=ServerSettings(host=host))


def test_own_keys_are_accepted_on_any_address() -> None:
    tenants = {"acme": TenantSettings(keys=(make_key("sk-secret"),))}
    assert not Settings(server=ServerSettings(host="0.0.0.0"), tenants=tenants).server.is_loopback


def test_a_tenant_with_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    tenants = {"acme": TenantSettings(policy="tihgt")}
    with pytest.raises(ValueError, match=r"'tihgt', known policies: default, tight"):
        Settings(tenants=tenants, policies={"tight": PolicySettings()})


def test_a_policy_changes_only_the_reducer_keys_it_names() -> None:
    settings = Settings(policies={"narrow": PolicySettings(reducer={"selection": {"top_k": 3}})})
    narrow = settings.reducer_config("narrow")
    assert narrow.selection.top_k == 3
    assert msgspec.structs.replace(narrow.selection, top_k=None) == settings.reducer.selection
    assert settings.reducer_config("default") == settings.reducer


def test_a_policy_with_an_unknown_reducer_key_is_refused_with_its_path() -> None:
    with pytest.raises(ConfigError, match=r"policies\.narrow\.reducer\.selection\.topk.*did you mean 'top_k'"):
        Settings(policies={"narrow": PolicySettings(reducer={"selection": {"topk": 3}})})


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_input_tokens", 0), ("tokens_per_day", -1), ("requests_per_minute", 0), ("ttft_slo_ms", 0)],
)
def test_a_limit_that_admits_nothing_is_refused_with_its_value(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{field} must be positive, got {value}"):
        msgspec.structs.replace(TenantSettings(), **{field: value})


def test_a_key_must_be_a_digest() -> None:
    with pytest.raises(ValueError, match="64 lower-case hex digits"):
        msgspec.structs.replace(make_key(GLOBEX_KEY), sha256=GLOBEX_KEY)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (CounterSettings, "lease_ttl_s"),
        (StorageSettings, "flush_interval_s"),
        (StorageSettings, "key_cache_s"),
        (BackendSettings, "idle_timeout_s"),
        (PolicySettings, "ttft_slo_ms"),
    ],
)
def test_a_time_that_is_no_number_is_refused(make: type[msgspec.Struct], name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} must .*, got nan"):
        make(**{name: float("nan")})


@pytest.mark.parametrize(
    ("tree", "path"),
    [
        ({"engine": {"cache": {"free_memory_share": float("nan")}}}, "engine.cache.free_memory_share"),
        ({"reducer": {"rank": {"lexical_weight": float("nan")}}}, "reducer.rank.lexical_weight"),
        ({"tenants": {"acme": {"requests_per_minute": float("nan")}}}, "tenants.acme.requests_per_minute"),
    ],
)
def test_nan_is_refused_wherever_it_stands(tree: dict[str, object], path: str) -> None:
    with pytest.raises(ConfigError, match="NaN is no value") as caught:
        struct_of(tree, Settings)
    assert caught.value.key == path


def test_one_value_in_place_of_a_list_is_refused_with_the_list_to_write() -> None:
    with pytest.raises(ConfigError, match=r"write a list: \['abc'\]"):
        struct_of({"admin": {"key_sha256": "abc"}}, Settings)
