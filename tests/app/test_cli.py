"""The command line: instant help, clear errors, compaction against a running gateway."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from factories_app import ACME_KEY, make_app, make_body, make_documents, served
from structlog.testing import capture_logs

from app.cli import main


def run(*arguments: str, **options: str | bytes) -> Result:
    return CliRunner().invoke(main, list(arguments), **options)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No configuration but the shipped one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FIRSTTOKEN_CONFIG", raising=False)


def test_help_names_every_command_and_imports_none() -> None:
    code = (
        "import sys\nfrom app.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print([name for name in ('torch', 'numpy', 'uvicorn', 'eval', 'reducer.pipeline') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for name in ("serve", "compact", "config", "models", "eval"):
        assert f"\n  {name} " in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", ["serve", "compact", "config", "models", "eval"])
def test_every_command_has_help(name: str) -> None:
    result = run(name, "--help")
    assert result.exit_code == 0
    assert f"Usage: main {name}" in result.output


def test_an_unknown_command_is_named() -> None:
    result = run("srve")
    assert result.exit_code == 2
    assert "No such command 'srve'" in result.output


def test_config_check_shows_what_would_be_served(tmp_path: Path) -> None:
    result = run("config", "check")
    assert result.exit_code == 0
    assert "example configuration: ok" in result.output
    assert "acme, globex" in result.output


def test_config_check_of_a_bad_file_names_file_and_key(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text("[server]\nprot = 1\n")
    result = run("config", "check", str(file))
    assert result.exit_code == 1
    assert result.output.strip() == f"Error: {file}: unknown key 'server.prot'; did you mean 'port'?"


def test_serve_refuses_a_bad_configuration_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIRSTTOKEN_HOST", "0.0.0.0")
    result = run("serve")
    assert result.exit_code == 1
    assert len(result.output.strip().splitlines()) == 1
    assert "only accepted on loopback" in result.output


def test_compact_asks_a_running_gateway() -> None:
    body = msgspec.json.encode(make_body(documents=make_documents(8), firsttoken={"max_input_tokens": 300}))
    with capture_logs(), served(make_app()) as url:
        table = run("compact", "--url", url, input=body)
        raw = run("compact", "--url", url, "--json", "--api-key", ACME_KEY, input=body)
        refused = run("compact", "--url", url, "--api-key", "sk-wrong", input=body)
        bad = run("compact", "--url", url, input=b"{}")
    assert "saved; budget 300 (request)" in table.output
    assert "gold" in table.output
    assert "[8]" in table.output
    assert msgspec.json.decode(raw.output)["prompt_tokens"] <= 300
    assert (refused.exit_code, bad.exit_code) == (1, 1)
    assert "HTTP 401: Incorrect API key" in refused.output
    assert "messages" in bad.output


def test_compact_shows_ids_as_they_are_and_lets_none_command_the_terminal() -> None:
    documents = [{"id": "[/b]x", "text": "A widget is 5."}, {"id": "a\x1b[2Jb", "text": "Widgets are blue."}]
    documents += [{"id": "[bold]c", "text": "a widget is 5"}, {"id": "i" * 100_000, "text": "Widgets are old."}]
    body = msgspec.json.encode(make_body(documents=documents))
    with capture_logs(), served(make_app()) as url:
        result = run("compact", "--url", url, input=body)
    assert result.exit_code == 0, result.output
    for shown in ("[/b]x", r"a\x1b[2Jb", "[bold]c"):
        assert shown in result.output
    assert "\x1b" not in result.output
    assert len(result.output) < 10_000


def test_compact_without_a_gateway_there_says_so() -> None:
    result = run("compact", "--url", "http://127.0.0.1:9", input=b"{}")
    assert result.exit_code == 1
    assert "http://127.0.0.1:9 does not answer" in result.output
