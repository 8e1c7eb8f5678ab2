"""Starting and ending a real process."""

import os
import sys
import time
from pathlib import Path

import httpx
import pytest

from eval.errors import LaunchError
from eval.launcher import started_gateway

_SERVER = """
import http.server, os, pathlib, sys
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = os.environ.get("FIRSTTOKEN_CONFIG", "none").encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.HTTPServer((os.environ["FIRSTTOKEN_HOST"], int(os.environ["FIRSTTOKEN_PORT"])), Handler).serve_forever()
"""


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_gateway_answers_while_in_use_and_is_gone_after(tmp_path: Path) -> None:
    config = tmp_path / "firsttoken.toml"
    config.touch()
    command = (sys.executable, "-c", _SERVER, str(tmp_path / "pid"))
    with started_gateway(config=config, command=command) as url:
        assert url.startswith("http://127.0.0.1:")
        assert httpx.get(f"{url}/anything").text == str(config)
        pid = int((tmp_path / "pid").read_text())
        assert _is_running(pid)
    assert not _is_running(pid)


def test_gateway_ends_when_the_run_is_interrupted(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    command = (sys.executable, "-c", _SERVER, str(pid_file))
    with pytest.raises(KeyboardInterrupt), started_gateway(command=command):
        raise KeyboardInterrupt
    assert not _is_running(int(pid_file.read_text()))


def test_children_of_the_gateway_end_with_it(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))\n"
    )
    command = (sys.executable, "-c", script + _SERVER, str(tmp_path / "pid"))
    with started_gateway(command=command):
        child = int((tmp_path / "child").read_text())
    for _ in range(50):
        if not _is_running(child) or _is_zombie(child):
            return
        time.sleep(0.1)
    pytest.fail(f"child {child} still runs")


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_gateway_that_ends_at_once_shows_its_log() -> None:
    command = (sys.executable, "-c", "import sys; print('no model here'); sys.exit(3)")
    with (
        pytest.raises(LaunchError, match=r"exit status 3 before it was ready:\nno model here"),
        started_gateway(command=command),
    ):
        pytest.fail("it never became ready")


def test_a_gateway_that_never_gets_ready_is_given_up() -> None:
    command = (sys.executable, "-c", "import time; time.sleep(60)")
    with (
        pytest.raises(LaunchError, match=r"not ready after 0 s \(last: ConnectError\)"),
        started_gateway(command=command, ready_timeout_s=0.3),
    ):
        pytest.fail("it never became ready")
