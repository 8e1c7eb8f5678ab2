"""``firsttoken config``: what is wrong and where, what is in effect and why, what the keys mean."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from factories_config import tenant_toml
from factories_storage import digest_of

from app.cli import main
from app.config_file import EXAMPLE_FILE
from app.config_schema import DIALECT, LIVE, config_schema, field_texts
from app.config_tree import struct_in
from app.settings import ServerSettings, Settings

TEXT = (
    '[server]\nport = 9001\nsalt_secret = "pepper"\n'
    '[storage]\nurl = "postgresql://firsttoken:hunter2@db/firsttoken"\n'
    '[counters]\nurl = "redis://:hunter3@cache:6379/0"\n' + tenant_toml("acme.eu", "sk-own", tokens_per_day=5)
)


def run(*arguments: str, **environ: str) -> Result:
    return CliRunner(env=environ).invoke(main, ["config", *arguments])


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "own.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[server]\nprot = 1\n", "unknown key 'server.prot'; did you mean 'port'?"),
        ("[reducer.failure]\nrnak = 'open'\n", "unknown key 'reducer.failure.rnak'; did you mean 'rank'?"),
        ("[reducer.failure]\naccess = 'open'\n", "reducer.failure.access: Invalid enum value 'open'"),
        ("[policies.tight.reducer.rank]\nlexical_wieght = 1\n", "did you mean 'lexical_weight'?"),
        ("[[backend.replicas]]\nurll = 'x'\n", "unknown key 'backend.replicas[0].urll'; did you mean 'url'?"),
        ("[relaod]\nwatch = false\n", "unknown key 'relaod'; did you mean 'reload'?"),
    ],
)
def test_check_names_path_and_hint(tmp_path: Path, text: str, told: str) -> None:
    path = write(tmp_path, text)
    result = run("check", path)
    assert result.exit_code == 1
    assert path in result.output
    assert told in result.output


def test_check_warns_of_a_replica_s_key_that_is_not_set(tmp_path: Path) -> None:
    text = (
        '[backend]\nkind = "openai"\nmodel = "m"\n[[backend.replicas]]\nurl = "http://h/v1"\napi_key_env = "OWN_KEY"\n'
    )
    path = write(tmp_path, text)
    assert "OWN_KEY is not set" in run("check", path).output
    assert "OWN_KEY" not in run("check", path, OWN_KEY="sk").output


def test_show_says_what_is_in_effect_and_where_it_comes_from(tmp_path: Path) -> None:
    text = TEXT.replace("tenants.acme.eu", 'tenants."acme.eu"')
    result = run("show", write(tmp_path, text), FIRSTTOKEN__ENGINE__MODEL__DTYPE="fp32", FIRSTTOKEN_HOST="::1")
    assert result.exit_code == 0, result.output
    lines = {line.partition(" = ")[0]: line.partition(" = ")[2] for line in result.output.splitlines()}
    found = {key: tuple(part.strip() for part in line.split("  # ")) for key, line in lines.items() if "  # " in line}
    assert found["server.port"] == ("9001", "file")
    assert found["server.host"] == ('"::1"', "FIRSTTOKEN_HOST")
    assert found["engine.model.dtype"] == ('"fp32"', "FIRSTTOKEN__ENGINE__MODEL__DTYPE")
    assert found["reload.watch"] == ("true", "default")
    assert found["limits.default_max_tokens"] == ("none", "default")
    assert found['tenants."acme.eu".tokens_per_day'] == ("5", "file")
    assert found['tenants."acme.eu".keys[0].name'] == ('"own"', "file")


def test_show_masks_secrets(tmp_path: Path) -> None:
    path = write(tmp_path, TEXT.replace("tenants.acme.eu", 'tenants."acme.eu"'))
    for arguments in (("show", path), ("show", path, "--json")):
        output = run(*arguments).output
        assert not any(secret in output for secret in ("pepper", "hunter2", "hunter3", digest_of("sk-own")))
        assert "postgresql://firsttoken:***@db/firsttoken" in output
        assert "redis://:***@cache:6379/0" in output
        assert digest_of("sk-own")[:12] in output


def test_show_lists_every_key_once(tmp_path: Path) -> None:
    values = json.loads(run("show", write(tmp_path, ""), "--json").output)
    keys = [value["key"] for value in values]
    assert len(set(keys)) == len(keys)
    assert set(keys) == set(leaves(msgspec.to_builtins(Settings())))
    live = {value["key"]: value["live"] for value in values}
    assert (live["server.port"], live["limits.default_max_tokens"], live["reducer.encoder.dtype"]) == (
        False,
        True,
        False,
    )


def test_show_changed_leaves_defaults_out(tmp_path: Path) -> None:
    output = run("show", write(tmp_path, "[server]\nport = 9001\n"), "--changed").output
    assert [line.partition(" ")[0] for line in output.splitlines()[1:]] == ["server.port"]


def test_show_of_a_bad_file_is_an_error(tmp_path: Path) -> None:
    result = run("show", write(tmp_path, "[server]\nport = 'x'\n"))
    assert result.exit_code == 1
    assert "server.port" in result.output


def test_schema_describes_every_key_and_says_which_are_live() -> None:
    schema = json.loads(run("schema").output)
    assert schema == json.loads(msgspec.json.encode(config_schema()))
    assert schema["$schema"] == DIALECT
    definitions = schema["$defs"]
    for kind in structs(Settings):
        properties = definitions[kind.__name__]["properties"]
        assert list(properties) == [field.encode_name for field in msgspec.structs.fields(kind)]
        assert definitions[kind.__name__]["additionalProperties"] is False
    assert definitions["ServerSettings"]["properties"]["port"][LIVE] is False
    assert definitions["TenantSettings"]["properties"]["tokens_per_day"][LIVE] is True
    assert definitions["LimitSettings"]["properties"]["output_reserve_tokens"]["description"].startswith(
        "Window tokens"
    )
    assert definitions["FailureConfig"]["properties"]["access"]["enum"] == ["closed"]


def test_the_schema_takes_the_example_and_refuses_unknown_keys_and_wrong_types() -> None:
    import tomllib

    schema = config_schema()
    example = tomllib.loads(EXAMPLE_FILE.read_text(encoding="utf-8"))
    assert list(mistakes(example, schema, schema)) == []
    assert list(mistakes({"server": {"prot": 1}}, schema, schema)) == ["server.prot"]
    assert list(mistakes({"server": {"port": "x"}}, schema, schema)) == ["server.port"]
    assert list(mistakes({"policies": {"a": {"reducer": {"rnak": {}}}}}, schema, schema)) == ["policies.a.reducer.rnak"]
    assert list(mistakes({"logging": {"level": "loud"}}, schema, schema)) == ["logging.level"]


def test_texts_of_fields_come_from_the_source() -> None:
    texts = field_texts(ServerSettings)
    assert texts["max_body_bytes"] == "Largest request body; a larger one is answered with 413."


def leaves(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key, below in value.items():
            yield from leaves(below, f"{path}.{key}" if path else key)
    else:
        yield path


def structs(kind: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    yield kind
    for field in msgspec.structs.fields(kind):
        inner = struct_in(field.type)
        if inner is not None:
            yield from structs(inner)


def mistakes(value: Any, schema: dict[str, Any], root: dict[str, Any], path: str = "") -> Iterator[str]:
    """Paths at which a value does not fit: as much of JSON Schema as the configuration's uses."""
    if "$ref" in schema:
        schema = {
            **root["$defs"][schema["$ref"].rpartition("/")[2]],
            **{k: v for k, v in schema.items() if k != "$ref"},
        }
    if "anyOf" in schema:
        if all(list(mistakes(value, one, root, path)) for one in schema["anyOf"]):
            yield path
        return
    kinds = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "object": dict, "array": list}
    if "type" in schema and not (schema["type"] != "null" and isinstance(value, kinds[schema["type"]])):  # type: ignore[arg-type]
        yield path
        return
    if "enum" in schema and value not in schema["enum"]:
        yield path
    for key, below in value.items() if isinstance(value, dict) else ():
        inner = schema.get("properties", {}).get(key, schema.get("additionalProperties", {}))
        where = f"{path}.{key}" if path else key
        if inner is False:
            yield where
        elif isinstance(inner, dict):
            yield from mistakes(below, inner, root, where)
    for index, below in enumerate(value) if isinstance(value, list) else ():
        yield from mistakes(below, schema.get("items", {}), root, f"{path}[{index}]")
