"""Which keys a change touches, and what of it can be put in force at once."""

import msgspec
import pytest
from factories_app import make_key, make_settings

from app.backend_settings import BackendSettings, ReplicaSettings
from app.config_changes import LIVE_KEYS, RESTART_KEYS, changes_between, is_live
from app.config_file import read_config
from app.config_view import config_values
from app.errors import ConfigError
from app.settings import EncoderSettings, LimitSettings, PolicySettings, ServerSettings, TenantSettings
from reducer.config import EncoderConfig, ReducerConfig


def test_equal_settings_have_no_changes() -> None:
    settings = make_settings()
    changes = changes_between(settings, make_settings())
    assert (changes.settings, changes.applied, changes.needs_restart) == (settings, (), ())


def test_live_keys_are_taken_and_the_others_stay() -> None:
    before = make_settings(server=ServerSettings(port=1), encoder=EncoderSettings(enabled=False))
    after = make_settings(
        acme={"tokens_per_day": 5},
        server=ServerSettings(port=2, max_body_bytes=9),
        encoder=EncoderSettings(enabled=True),
        limits=LimitSettings(default_max_tokens=7),
        policies={"tight": PolicySettings(max_input_tokens=3)},
        reducer=ReducerConfig(min_prompt_tokens=1, encoder=EncoderConfig(max_batch_tokens=2)),
    )
    changes = changes_between(before, after)
    assert changes.applied == (
        "server.max_body_bytes",
        "reducer.min_prompt_tokens",
        "limits.default_max_tokens",
        "policies.tight",
        "tenants.acme.tokens_per_day",
    )
    assert changes.needs_restart == ("server.port", "encoder.enabled", "reducer.encoder.max_batch_tokens")
    settings = changes.settings
    assert (settings.server.port, settings.server.max_body_bytes) == (1, 9)
    assert (settings.encoder.enabled, settings.reducer.encoder.max_batch_tokens) == (False, 1024)
    assert (settings.reducer.min_prompt_tokens, settings.limits, settings.policies) == (
        1,
        after.limits,
        after.policies,
    )
    assert settings.tenants == after.tenants


def test_what_waits_is_found_again_at_every_comparison() -> None:
    before, after = make_settings(server=ServerSettings(port=1)), make_settings(server=ServerSettings(port=2))
    in_force = changes_between(before, after).settings
    assert changes_between(in_force, after).needs_restart == ("server.port",)
    assert changes_between(in_force, before).needs_restart == ()


def test_removed_and_added_tenants_with_dots_in_their_names() -> None:
    before = make_settings()
    after = msgspec.structs.replace(before, tenants={"acme.eu": TenantSettings(keys=(make_key("sk-1"),))})
    changes = changes_between(before, after)
    assert changes.applied == ("tenants.acme", "tenants.globex", "tenants.acme.eu")
    assert changes.settings.tenants == after.tenants


def test_another_kind_of_backend_waits_and_its_live_keys_alone_are_refused_where_they_do_not_fit() -> None:
    """An embedded backend takes any replicas; an openai one in force needs some."""
    openai = BackendSettings(kind="openai", model="m", replicas=(ReplicaSettings(url="http://h/v1"),))
    with pytest.raises(ConfigError, match=r"as long as no restart applies backend.kind, backend.model"):
        changes_between(make_settings(backend=openai), make_settings())
    changes = changes_between(make_settings(), make_settings(backend=openai))
    assert changes.needs_restart == ("backend.kind", "backend.model")


def test_live_keys_exist() -> None:
    keys = [value.key for value in config_values(read_config(environ={}))]
    for key in (*LIVE_KEYS, *RESTART_KEYS):
        assert any(found == key or found.startswith((f"{key}.", f"{key}[")) for found in keys), key


def test_a_key_that_only_begins_like_a_live_one_is_none() -> None:
    assert is_live("reducer.rank.lexical_weight")
    assert not is_live("reducer.encoder.dtype")
    assert not is_live("reducers")
    assert not is_live("logging.format")
