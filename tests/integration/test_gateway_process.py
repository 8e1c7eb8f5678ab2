"""The gateway as a process: how it starts, survives its engine, and ends."""

import os
import signal
import socket
import subprocess
import sys
import time

import httpx
import msgspec
import pytest
from factories_app import bearer, wait_until
from factories_gateway import ROOT, is_running, missing_models, running_gateway

pytestmark = pytest.mark.skipif(missing_models() is not None, reason=str(missing_models()))

SMALL = "[engine.cache]\nnum_blocks = 64\n"
BODY = {"model": "default", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "temperature": 0}


def test_a_killed_engine_is_503_then_comes_back_and_sigterm_leaves_nothing() -> None:
    with (
        running_gateway(SMALL, FIRSTTOKEN__ENCODER__ENABLED="false") as gateway,
        httpx.Client(base_url=gateway.url, headers=bearer(), timeout=60) as http,
    ):
        assert http.post("/v1/chat/completions", json=BODY).status_code == 200
        os.kill(gateway.engine_pid(), signal.SIGKILL)
        assert wait_until(lambda: http.get("/health").status_code == 503, timeout_s=5)
        refused = http.post("/v1/chat/completions", json=BODY | {"stream": True})
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert http.get("/livez").status_code == 200
        assert wait_until(lambda: http.get("/ready").status_code == 200, timeout_s=90)
        assert http.post("/v1/chat/completions", json=BODY).status_code == 200
        below = gateway.descendants()
        assert below
        assert gateway.stop(signal.SIGTERM) == 0
        assert wait_until(lambda: not any(is_running(pid) for pid in below), timeout_s=5)


def test_sigint_while_a_stream_runs_ends_the_stream_and_the_gateway() -> None:
    long = BODY | {"max_tokens": 900, "ignore_eos": True, "stream": True}
    with (
        running_gateway(
            SMALL, FIRSTTOKEN__ENCODER__ENABLED="false", FIRSTTOKEN__SERVER__SHUTDOWN_GRACE_S="1.0"
        ) as gateway,
        httpx.Client(base_url=gateway.url, headers=bearer(), timeout=60) as http,
        http.stream("POST", "/v1/chat/completions", json=long) as response,
    ):
        next(response.iter_bytes())
        below = gateway.descendants()
        started = time.monotonic()
        assert gateway.stop(signal.SIGINT) == 0
        assert time.monotonic() - started < 60
        assert wait_until(lambda: not any(is_running(pid) for pid in below), timeout_s=5)


def test_an_address_in_use_is_one_line_before_any_model_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "app.cli", "serve"],
            cwd=ROOT,
            env=os.environ | {"FIRSTTOKEN_PORT": str(port), "FIRSTTOKEN_CONFIG": "app/example.toml"},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1
    assert done.stderr.strip() == f"Error: cannot listen on 127.0.0.1:{port}: Address already in use"
    assert time.monotonic() - started < 60


def test_a_model_that_is_missing_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "app.cli", "serve"],
        cwd=ROOT,
        env=os.environ
        | {
            "FIRSTTOKEN_PORT": "0",
            "FIRSTTOKEN_CONFIG": "app/example.toml",
            "FIRSTTOKEN__ENGINE__MODEL__MODEL": "no-such-model",
            "FIRSTTOKEN__ENCODER__ENABLED": "false",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert "no-such-model" in done.stderr


def test_compact_without_a_gateway_counts_as_the_gateway_does() -> None:
    documents = [
        {"id": f"d{i}", "text": f"Fact {i}: the lamp of lighthouse {i} turns {i + 2} times."} for i in range(40)
    ]
    body = msgspec.json.encode(BODY | {"documents": documents, "firsttoken": {"max_input_tokens": 200}})
    answers = []
    with running_gateway(SMALL) as gateway:
        for options in ([], ["--url", gateway.url]):
            done = subprocess.run(
                [sys.executable, "-m", "app.cli", "compact", "--json", *options],
                cwd=ROOT,
                env=os.environ | {"FIRSTTOKEN_CONFIG": "app/example.toml"},
                input=body,
                capture_output=True,
                timeout=120,
            )
            assert done.returncode == 0, done.stderr
            answers.append(msgspec.json.decode(done.stdout))
    here, there = answers
    assert here["messages"] == there["messages"]
    assert here["prompt_tokens"] == there["prompt_tokens"] <= 200
    assert here["original_prompt_tokens"] == there["original_prompt_tokens"] > 600
