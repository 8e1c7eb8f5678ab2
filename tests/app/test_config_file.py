"""Reading the configuration: where it comes from, and errors that name file and key."""

from pathlib import Path

import pytest

from app.config_file import load_settings
from app.errors import ConfigError


def write(path: Path, text: str) -> Path:
    file = path / "own.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_without_a_file_the_shipped_example_serves_acme_and_globex(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings, source = load_settings(environ={})
    assert source == "example configuration"
    assert sorted(settings.tenants) == ["acme", "globex"]
    assert all(key.groups == ("staff", "public") for tenant in settings.tenants.values() for key in tenant.keys)
    assert (settings.server.host, settings.server.port) == ("127.0.0.1", 8080)
    assert settings.server.served_model_name == "default"


def test_a_file_in_the_working_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "firsttoken.toml").write_text("[server]\nport = 9001\n")
    monkeypatch.chdir(tmp_path)
    settings, source = load_settings(environ={})
    assert (settings.server.port, source) == (9001, "firsttoken.toml")


def test_the_named_file_wins_over_the_one_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "firsttoken.toml").write_text("[server]\nport = 9001\n")
    monkeypatch.chdir(tmp_path)
    named = write(tmp_path, "[server]\nport = 9002\n")
    assert load_settings(environ={"FIRSTTOKEN_CONFIG": str(named)}).settings.server.port == 9002


def test_a_named_file_that_is_missing_is_an_error_not_a_fallback(tmp_path: Path) -> None:
    missing = tmp_path / "missing.toml"
    with pytest.raises(ConfigError, match=r"missing\.toml: cannot be read"):
        load_settings(environ={"FIRSTTOKEN_CONFIG": str(missing)})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[server]\nprot = 1\n", r"unknown key 'server\.prot'; did you mean 'port'\?"),
        ("[zzz]\n", r"unknown key 'zzz'; known keys: server, backend, engine"),
        ("[engine.model]\ndtpye = 'fp32'\n", r"unknown key 'engine\.model\.dtpye'; did you mean 'dtype'"),
        ("[reducer.dedup]\nenabeld = false\n", r"unknown key 'reducer\.dedup\.enabeld'"),
        ("[tenants.acme]\nrpm = 3\n", r"unknown key 'tenants\.acme\.rpm'"),
        ("[[tenants.acme.keys]]\nsha256 = 'x'\nx = 1\n", r"unknown key 'tenants\.acme\.keys\[0\]\.x'"),
        ("[[tenants.acme.keys]]\nname = 'x'\n", r"tenants\.acme\.keys\[0\]\.sha256 is missing"),
        ("[[tenants.acme.keys]]\nsha256 = 'x'\n", r"tenants\.acme\.keys\[0\]: sha256 must be 64"),
        ("[server]\nport = 'eighty'\n", r"server\.port: Expected `int`, got `str`"),
        ("[server]\nport = 70000\n", r"server: port must be between 0 and 65535, got 70000"),
        ("[tenants.' ']\n", r"tenant id must be .* got ' '"),
        ("[server\n", "not valid TOML"),
    ],
)
def test_a_mistake_is_told_with_file_and_path(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_settings(write(tmp_path, text), environ={})
    assert str(caught.value).startswith(str(tmp_path / "own.toml"))


def test_environment_overrides_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "[server]\nhost = '127.0.0.1'\nport = 9001\n[limits]\noutput_reserve_tokens = 1\n")
    environ = {
        "FIRSTTOKEN_HOST": "::1",
        "FIRSTTOKEN_PORT": "9100",
        "FIRSTTOKEN__ENGINE__MODEL__DTYPE": "fp32",
        "FIRSTTOKEN__ENCODER__ENABLED": "false",
        "FIRSTTOKEN__ENGINE__MODEL__MODEL": "Qwen/Qwen3-0.6B",
        "FIRSTTOKEN_CACHE": "/elsewhere",
    }
    settings = load_settings(file, environ=environ).settings
    assert (settings.server.host, settings.server.port) == ("::1", 9100)
    assert (settings.engine.model.dtype, settings.engine.model.model) == ("fp32", "Qwen/Qwen3-0.6B")
    assert settings.encoder.enabled is False
    assert settings.limits.output_reserve_tokens == 1


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("FIRSTTOKEN__SERVER__PROT", "1", r"unknown key 'server\.prot'"),
        ("FIRSTTOKEN_PORT", "http", r"server\.port: Expected `int`"),
        ("FIRSTTOKEN_PORT", "", "FIRSTTOKEN_PORT='' has an empty value"),
        ("FIRSTTOKEN__SERVER__", "1", "empty path segment"),
    ],
)
def test_a_mistake_in_the_environment_is_told(tmp_path: Path, name: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(write(tmp_path, ""), environ={name: value})


def test_demo_keys_on_a_public_address_are_refused_by_the_environment_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="only accepted on loopback"):
        load_settings(environ={"FIRSTTOKEN_HOST": "0.0.0.0"})
