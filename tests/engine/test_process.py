"""Engine process and client, with a small fake engine: outputs, errors, cancellation, death and restart, no orphans."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
from factories_process import (
    ANSWER,
    BREAK,
    DIE,
    FAKE,
    HOLD,
    MALFORMED,
    ODD,
    QUEUE_FULL,
    SLEEP,
    STALL,
    TOO_LONG,
    make_request,
)
from factories_tokenizer import write_gguf_tokenizer

from engine.config import EngineConfig, ModelConfig
from engine.errors import EngineDeadError, EngineError, ModelError, PromptTooLongError, QueueFullError
from engine.outputs import GenerateRequest, RequestOutput
from engine.process import EngineClient, RestartPolicy

FAST = RestartPolicy(first_delay_s=0.05, max_delay_s=0.2, start_timeout_s=30)


def make_config(folder: Path) -> EngineConfig:
    path = folder / "tiny.gguf"
    if not path.exists():
        write_gguf_tokenizer(path)
    return EngineConfig(model=ModelConfig(model=str(path)))


@asynccontextmanager
async def started(folder: Path) -> AsyncIterator[EngineClient]:
    client = await EngineClient.start(make_config(folder), factory=FAKE, restart=FAST)
    try:
        yield client
    finally:
        await client.close()


async def collect(client: EngineClient, request: GenerateRequest) -> list[RequestOutput]:
    return [output async for output in client.generate(request)]


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait for ``condition``, or fail."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not become true in time"
        await asyncio.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rsplit(")", 1)[1].split()[0] != "Z"


async def test_request_is_answered_step_by_step(tmp_path: Path) -> None:
    async with started(tmp_path) as client:
        outputs = await collect(client, make_request(num_prompt_tokens=7, max_tokens=4))
        assert [output.text for output in outputs] == ["7,", "x", "x", "x"]
        assert [output.finish_reason for output in outputs] == [None, None, None, "length"]
        assert client.is_alive
        assert client.info.vocab_size == 700
        assert client.info.attention_backend == "none"  # torch is not in the engine process
        assert client.chat.count_text("abc") > 0


async def test_fifty_concurrent_requests_get_their_own_outputs(tmp_path: Path) -> None:
    async with started(tmp_path) as client:
        requests = [make_request(f"r{i}", num_prompt_tokens=i + 1, max_tokens=1 + i % 9) for i in range(50)]
        results = await asyncio.gather(*(collect(client, request) for request in requests))
    for index, outputs in enumerate(results):
        assert {output.request_id for output in outputs} == {f"r{index}"}
        assert "".join(output.text for output in outputs) == f"{index + 1}," + "x" * (index % 9)


async def test_message_of_a_hundred_thousand_tokens_arrives(tmp_path: Path) -> None:
    async with started(tmp_path) as client:
        outputs = await collect(client, make_request(num_prompt_tokens=100_000, max_tokens=1))
        assert outputs[0].text == "100000,"


@pytest.mark.parametrize(
    ("command", "error", "text"),
    [
        (QUEUE_FULL, QueueFullError, "17 sequences are waiting already"),
        (TOO_LONG, PromptTooLongError, "prompt of 9000 tokens does not fit into the window of 8192"),
        (MALFORMED, ValueError, "token id 999 is outside the vocabulary of 700 ids"),
        (ODD, EngineError, "RuntimeError: something odd"),
    ],
)
async def test_refusal_reaches_the_caller_as_the_same_exception(
    command: int, error: type[Exception], text: str, tmp_path: Path
) -> None:
    async with started(tmp_path) as client:
        with pytest.raises(error, match=text) as raised:
            await collect(client, make_request(command=command))
        assert type(raised.value) is error
        if isinstance(raised.value, QueueFullError):
            assert (raised.value.num_waiting, raised.value.retry_after_s) == (17, 2.5)
        if isinstance(raised.value, PromptTooLongError):
            assert (raised.value.num_prompt_tokens, raised.value.max_model_len) == (9000, 8192)
        assert len(await collect(client, make_request("next"))) == 3


async def test_request_id_in_use_is_refused(tmp_path: Path) -> None:
    async with started(tmp_path) as client, aclosing(client.generate(make_request(max_tokens=10_000))) as first:
        await anext(first)
        with pytest.raises(ValueError, match="'r' is in use"):
            await collect(client, make_request())
        assert (await anext(first)).text == "x"


async def test_closing_the_iterator_aborts_the_request(tmp_path: Path) -> None:
    async with started(tmp_path) as client:
        async with aclosing(client.generate(make_request(max_tokens=10**6))) as outputs:
            await anext(outputs)
            await until(lambda: client.stats.num_running == 1)
        await until(lambda: client.stats.num_running == 0)
        assert len(await collect(client, make_request())) == 3  # the id is free again


async def test_cancelling_the_consumer_aborts_the_request(tmp_path: Path) -> None:
    async with started(tmp_path) as client:
        task = asyncio.create_task(collect(client, make_request(max_tokens=10**6)))
        await until(lambda: client.stats.num_running == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: client.stats.num_running == 0)


async def test_abort_from_outside_ends_the_iterator(tmp_path: Path) -> None:
    async with started(tmp_path) as client:
        task = asyncio.create_task(collect(client, make_request(max_tokens=10**6)))
        await until(lambda: client.stats.num_running == 1)
        await client.abort("r")
        await client.abort("unknown")
        assert (await task)[-1].finish_reason == "abort"


async def test_stats_are_pushed_at_a_bounded_rate_and_at_the_end(tmp_path: Path) -> None:
    async with started(tmp_path) as client:
        assert client.stats.num_steps == 0
        seen = set()
        async for _ in client.generate(make_request(max_tokens=300)):
            seen.add(client.stats.num_steps)
        await until(lambda: client.stats.num_running == 0 and client.stats.num_steps == 300)
        assert client.stats.generation_tokens == 300
        assert len(seen) < 150  # of 300 steps


async def test_killed_engine_fails_what_is_in_flight_and_is_restarted(tmp_path: Path) -> None:
    async with started(tmp_path) as client:
        tasks = [asyncio.create_task(collect(client, make_request(f"r{i}", max_tokens=10**6))) for i in range(5)]
        await until(lambda: client.stats.num_running == 5)
        first_pid = client.pid
        assert first_pid is not None
        killed_s = time.monotonic()
        os.kill(first_pid, signal.SIGKILL)
        for task in tasks:
            with pytest.raises(EngineDeadError, match="killed by SIGKILL") as raised:
                await task
            assert raised.value.retry_after_s >= 1.0
        assert time.monotonic() - killed_s < 30
        assert not client.is_alive
        assert client.pid is None
        with pytest.raises(EngineDeadError, match="being started again"):
            await collect(client, make_request())
        await until(lambda: client.is_alive)
        assert client.pid != first_pid
        assert client.num_restarts == 1
        assert client.stats.num_running == 0
        assert len(await collect(client, make_request())) == 3


async def test_engine_that_dies_by_a_request_comes_back(tmp_path: Path) -> None:
    async with started(tmp_path) as client:
        for _ in range(2):
            with pytest.raises(EngineDeadError):
                await collect(client, make_request(command=DIE))
            await until(lambda: client.is_alive)
        assert len(await collect(client, make_request())) == 3
        assert client.num_restarts == 2


async def test_queued_requests_are_kept_over_a_restart(tmp_path: Path) -> None:
    async with started(tmp_path) as client:
        (tmp_path / "hold").touch()
        queued = [asyncio.create_task(collect(client, make_request(f"q{i}", command=HOLD))) for i in range(3)]
        running = asyncio.create_task(collect(client, make_request("r", max_tokens=10**6)))
        await until(lambda: client.stats.num_running == 4)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
            await running
        (tmp_path / "hold").unlink()
        assert [len(outputs) for outputs in await asyncio.gather(*queued)] == [3, 3, 3]
        assert client.num_restarts == 1


async def test_queued_requests_fail_when_the_engine_does_not_come_back(tmp_path: Path) -> None:
    restart = RestartPolicy(first_delay_s=0.05, max_delay_s=0.1, start_timeout_s=30, keep_queued_s=0.2)
    client = await EngineClient.start(make_config(tmp_path), factory=FAKE, restart=restart)
    try:
        (tmp_path / "hold").touch()
        (tmp_path / "broken-model").touch()
        queued = asyncio.create_task(collect(client, make_request("q", command=HOLD)))
        await until(lambda: client.stats.num_running == 1)
        with pytest.raises(EngineDeadError):
            await collect(client, make_request(command=DIE))
        with pytest.raises(EngineDeadError, match="could not be started again"):
            await queued
    finally:
        await client.close()


async def test_close_fails_requests_that_wait_for_the_next_process(tmp_path: Path) -> None:
    restart = RestartPolicy(first_delay_s=60.0)
    client = await EngineClient.start(make_config(tmp_path), factory=FAKE, restart=restart)
    (tmp_path / "hold").touch()
    queued = asyncio.create_task(collect(client, make_request("q", command=HOLD)))
    await until(lambda: client.stats.num_running == 1)
    with pytest.raises(EngineDeadError):
        await collect(client, make_request(command=DIE))
    assert not queued.done()
    await client.close()
    with pytest.raises(EngineDeadError, match="shut down"):
        await queued


async def test_step_that_hangs_is_ended_and_only_its_requests_fail(tmp_path: Path) -> None:
    restart = RestartPolicy(first_delay_s=0.05, start_timeout_s=30, step_timeout_s=3.0)
    client = await EngineClient.start(make_config(tmp_path), factory=FAKE, restart=restart)
    try:
        hanging = asyncio.create_task(collect(client, make_request("sleep", command=SLEEP)))
        await asyncio.sleep(0.3)
        late = asyncio.create_task(collect(client, make_request("late")))  # the process cannot even read it
        with pytest.raises(EngineDeadError, match="a step did not end within 3 s"):
            await hanging
        assert len(await late) == 3
    finally:
        await client.close()


async def test_sigterm_lets_the_engine_finish_what_it_has_and_keep_what_comes_for_the_next(tmp_path: Path) -> None:
    async with started(tmp_path) as client:
        first_pid = client.pid
        assert first_pid is not None
        running = asyncio.create_task(collect(client, make_request("r", max_tokens=300)))
        await until(lambda: client.stats.num_running == 1)
        os.kill(first_pid, signal.SIGTERM)
        await asyncio.sleep(0.05)
        late = asyncio.create_task(collect(client, make_request("late")))
        assert len(await running) == 300
        assert len(await late) == 3
        assert client.pid != first_pid
        assert not is_running(first_pid)


async def test_idle_engine_leaves_on_sigterm_and_another_one_comes(tmp_path: Path) -> None:
    async with started(tmp_path) as client:
        first_pid = client.pid
        assert first_pid is not None
        os.kill(first_pid, signal.SIGTERM)
        await until(lambda: not is_running(first_pid))
        await until(lambda: client.is_alive)
        assert len(await collect(client, make_request())) == 3


async def test_broken_invariant_says_what_broke_and_is_survived(tmp_path: Path) -> None:
    async with started(tmp_path) as client:
        with pytest.raises(EngineDeadError, match="AssertionError: two sequences own block 5"):
            await collect(client, make_request(command=BREAK))
        await until(lambda: client.is_alive)
        assert len(await collect(client, make_request())) == 3


async def test_engine_that_does_not_start_again_is_tried_until_it_does(tmp_path: Path) -> None:
    async with started(tmp_path) as client:
        (tmp_path / "broken-model").touch()
        with pytest.raises(EngineDeadError):
            await collect(client, make_request(command=DIE))

        async def says_why() -> bool:
            try:
                await collect(client, make_request())
            except EngineDeadError as error:
                return "could not be started again" in str(error) and "has a wrong digest" in str(error)
            return False

        deadline = time.monotonic() + 10
        while not await says_why():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        (tmp_path / "broken-model").unlink()
        await until(lambda: client.is_alive)
        assert len(await collect(client, make_request())) == 3


async def test_stalled_engine_takes_messages_without_spinning(tmp_path: Path) -> None:
    async with started(tmp_path) as client:
        stalled = asyncio.create_task(collect(client, make_request("stalled", command=STALL)))
        await asyncio.sleep(0.2)
        ticks_before = _cpu_ticks(client.pid)
        await asyncio.sleep(0.5)
        assert _cpu_ticks(client.pid) - ticks_before <= 0.25 * os.sysconf("SC_CLK_TCK")
        assert len(await collect(client, make_request("next"))) == 3
        await client.abort("stalled")
        assert (await stalled)[-1].finish_reason == "abort"


def _cpu_ticks(pid: int | None) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


async def test_start_failure_is_the_engines_own_error(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    (tmp_path / "broken-model").touch()
    with pytest.raises(ModelError, match=r"tiny\.gguf has a wrong digest"):
        await EngineClient.start(config, factory=FAKE)


async def test_missing_model_is_a_model_error(tmp_path: Path) -> None:
    config = EngineConfig(model=ModelConfig(model=str(tmp_path / "nowhere.gguf")))
    with pytest.raises(ModelError, match=r"nowhere\.gguf"):
        await EngineClient.start(config, factory=FAKE)


async def test_process_that_ends_while_starting_says_how(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    (tmp_path / "exit-at-start").touch()
    with pytest.raises(EngineError, match="could not start: its process ended with exit code 3"):
        await EngineClient.start(config, factory=FAKE)


async def test_unknown_factory_is_an_engine_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="nosuchmodule"):
        await EngineClient.start(make_config(tmp_path), factory="nosuchmodule:make")


@pytest.fixture
def socket_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where engine processes started in this test have their sockets."""
    folder = tmp_path / "s"
    folder.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    if len(os.fsencode(folder)) > 70:
        pytest.skip(f"{folder} is too long for Unix sockets")
    return folder


async def test_slow_start_times_out_and_leaves_nothing(tmp_path: Path, socket_folder: Path) -> None:
    config = make_config(tmp_path)
    (tmp_path / "slow-start").touch()
    with pytest.raises(EngineError, match="did not start within 1 s"):
        await EngineClient.start(config, factory=FAKE, restart=RestartPolicy(start_timeout_s=1))
    assert list(socket_folder.iterdir()) == []
    assert not _children()


async def test_cancelled_start_leaves_nothing(tmp_path: Path, socket_folder: Path) -> None:
    config = make_config(tmp_path)
    (tmp_path / "slow-start").touch()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(EngineClient.start(config, factory=FAKE), 1)
    assert list(socket_folder.iterdir()) == []
    assert not _children()


async def test_close_stops_the_process_and_fails_what_is_in_flight(tmp_path: Path, socket_folder: Path) -> None:
    client = await EngineClient.start(make_config(tmp_path), factory=FAKE)
    task = asyncio.create_task(collect(client, make_request(max_tokens=10**6)))
    await until(lambda: client.stats.num_running == 1)
    pid = client.pid
    assert pid is not None
    assert len(list(socket_folder.iterdir())) == 1
    assert (next(socket_folder.iterdir()).stat().st_mode & 0o777) == 0o700
    await client.close()
    with pytest.raises(EngineDeadError, match="shut down"):
        await task
    with pytest.raises(EngineDeadError, match="shut down"):
        await collect(client, make_request())
    assert not is_running(pid)
    assert not client.is_alive
    assert list(socket_folder.iterdir()) == []
    await client.close()


async def test_close_during_a_long_step_terminates_the_process(tmp_path: Path) -> None:
    client = await EngineClient.start(make_config(tmp_path), factory=FAKE)
    task = asyncio.create_task(collect(client, make_request(command=SLEEP)))
    await asyncio.sleep(0.2)
    start = time.monotonic()
    await client.close(grace_s=0.3)
    assert time.monotonic() - start < 30
    with pytest.raises(EngineDeadError):
        await task
    assert not _children()


@pytest.mark.parametrize("pause_s", [0.0, 0.06, 0.3])
async def test_close_between_two_processes_leaves_none(pause_s: float, tmp_path: Path, socket_folder: Path) -> None:
    client = await EngineClient.start(make_config(tmp_path), factory=FAKE, restart=FAST)
    with pytest.raises(EngineDeadError):
        await collect(client, make_request(command=DIE))
    await asyncio.sleep(pause_s)
    await client.close()
    assert not client.is_alive
    assert not _children()
    assert list(socket_folder.iterdir()) == []


async def test_event_loop_that_ends_without_close_leaves_no_process(tmp_path: Path, socket_folder: Path) -> None:
    code = f"""
import asyncio, sys
sys.path[:0] = {[str(Path(__file__).parent.parent)]!r}
from engine.config import EngineConfig, ModelConfig
from engine.process import EngineClient

async def main():
    client = await EngineClient.start(
        EngineConfig(model=ModelConfig(model={make_config(tmp_path).model.model!r})), factory={FAKE!r}
    )
    print(client.pid)

if __name__ == "__main__":
    asyncio.run(main())
"""
    script = tmp_path / "main.py"
    script.write_text(code)
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, str(script)], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    await until(lambda: not is_running(int(done.stdout)), 5)
    assert list(socket_folder.iterdir()) == []


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("command", [ANSWER, SLEEP])
async def test_death_of_the_parent_ends_the_engine(
    how: signal.Signals, command: int, tmp_path: Path, socket_folder: Path
) -> None:
    code = f"""
import asyncio, sys
sys.path[:0] = {[str(Path(__file__).parent.parent)]!r}
from engine.config import EngineConfig, ModelConfig
from engine.process import EngineClient
from factories_process import make_request

async def main():
    client = await EngineClient.start(
        EngineConfig(model=ModelConfig(model={make_config(tmp_path).model.model!r})), factory={FAKE!r}
    )
    print(client.pid, flush=True)
    async for output in client.generate(make_request(command={command}, max_tokens=10**6)):
        pass

if __name__ == "__main__":
    asyncio.run(main())
"""
    script = tmp_path / "main.py"
    script.write_text(code)
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(await asyncio.to_thread(parent.stdout.readline))
    await asyncio.sleep(0.2)
    assert is_running(pid)
    parent.send_signal(how)
    parent.wait(10)
    parent.stdout.close()
    await until(lambda: not is_running(pid), 3)
    assert list(socket_folder.iterdir()) == []


async def test_ctrl_c_does_not_reach_the_engine(tmp_path: Path) -> None:
    async with started(tmp_path) as client:
        assert client.pid is not None
        os.kill(client.pid, signal.SIGINT)
        assert len(await collect(client, make_request())) == 3


def test_pauses_between_restarts_double_up_to_a_limit() -> None:
    policy = RestartPolicy(first_delay_s=0.5, max_delay_s=30)
    assert [policy.delay_s(n) for n in (1, 2, 3, 7, 8, 10_000)] == [0.5, 1, 2, 30, 30, 30]


def _children() -> list[int]:
    """Engine processes of this one that still run."""
    children = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rsplit(")", 1)[1].split()
            command = (path / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == os.getpid() and fields[0] != "Z" and b"spawn_main" in command:
            children.append(int(path.name))
    return children
