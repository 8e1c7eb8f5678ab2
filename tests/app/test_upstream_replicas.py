"""Several replicas behind one gateway: affinity, retries where nothing was sent, breakers, health."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from factories_app import bearer, make_body, wait_until
from factories_upstream import Upstream, frames_of, gateway_on, running_upstream


@pytest.fixture
def pair() -> Iterator[tuple[Upstream, Upstream]]:
    with running_upstream() as one, running_upstream() as two:
        yield one, two


def post(url: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/chat/completions", json=make_body(**fields), headers=bearer(), timeout=20)


def counts(pair: tuple[Upstream, Upstream]) -> list[int]:
    return [len(upstream.log()) for upstream in pair]


def test_one_beginning_stays_on_one_replica_and_many_use_both(pair: tuple[Upstream, Upstream]) -> None:
    with gateway_on(*pair) as url:
        for n in range(4):
            assert post(
                url, messages=[{"role": "system", "content": "S"}, {"role": "user", "content": f"{n}"}]
            ).is_success
        assert sorted(counts(pair)) == [0, 4]
        for n in range(16):
            assert post(
                url, messages=[{"role": "system", "content": f"S{n}"}, {"role": "user", "content": "x"}]
            ).is_success
        assert min(counts(pair)) > 0


@pytest.mark.parametrize("failure", [{"status": 500, "body": "boom"}, {"status": 503}, {"die_after": 0}])
@pytest.mark.parametrize("is_stream", [False, True])
def test_what_fails_before_its_first_event_is_tried_elsewhere(
    pair: tuple[Upstream, Upstream], failure: dict[str, Any], is_stream: bool
) -> None:
    with gateway_on(*pair) as url:
        for upstream in pair:
            upstream.control(**failure, times=1)
        response = post(url, stream=is_stream)
        # The other replica fails once as well, then the first one is not tried again: two tries, two replicas.
        assert counts(pair) == [1, 1]
        assert response.status_code in (502, 503)
        assert post(url, stream=is_stream).status_code == 200


def test_a_stream_that_has_begun_is_never_repeated(pair: tuple[Upstream, Upstream]) -> None:
    with gateway_on(*pair) as url:
        for upstream in pair:
            upstream.control(die_after=2)
        frames = frames_of(post(url, stream=True).text)
        assert sum(counts(pair)) == 1
        assert "error" in frames[-1]


def test_refusals_are_not_tried_elsewhere(pair: tuple[Upstream, Upstream]) -> None:
    with gateway_on(*pair) as url:
        for upstream in pair:
            upstream.control(status=422, body={"detail": [{"msg": "no"}]})
        assert post(url).status_code == 422
        assert sum(counts(pair)) == 1


def test_a_dead_replica_is_left_alone_and_the_gateway_stays_ready(pair: tuple[Upstream, Upstream]) -> None:
    with gateway_on(*pair, failure_threshold=1, open_s=60.0) as url:
        pair[0].kill()
        for n in range(8):
            response = post(url, messages=[{"role": "user", "content": f"question {n}"}])
            assert response.status_code == 200, response.text
        assert httpx.get(f"{url}/ready").status_code == 200
        lines = [
            line for line in httpx.get(f"{url}/metrics").text.splitlines() if line.startswith("firsttoken_replica_")
        ]
        up = {line.rpartition(" ")[2] for line in lines if line.startswith("firsttoken_replica_up")}
        running = {line.rpartition(" ")[2] for line in lines if line.startswith("firsttoken_replica_requests_running")}
        assert len(lines) == 6
        # Which replica the questions went to first is the ring's business; the dead one may not have been asked.
        assert up <= {"0.0", "1.0"}
        assert running == {"0.0"}


def test_without_any_replica_requests_are_refused_and_come_back_with_it() -> None:
    with (
        running_upstream() as upstream,
        gateway_on(upstream, failure_threshold=1, open_s=0.3, health_interval_s=0.1) as url,
    ):
        upstream.control(health=500, status=500, body="down")
        assert wait_until(lambda: httpx.get(f"{url}/ready").status_code == 503)
        response = post(url)
        assert response.status_code in (502, 503)
        upstream.control()
        assert wait_until(lambda: post(url).status_code == 200)
        assert httpx.get(f"{url}/ready").status_code == 200


def test_a_silent_upstream_is_a_timeout_with_a_status(pair: tuple[Upstream, Upstream]) -> None:
    with gateway_on(pair[0], first_token_timeout_s=0.5, idle_timeout_s=0.5) as url:
        assert post(url, x_behaviour={"hang_after": -1}).status_code == 504
        assert post(url, stream=True, x_behaviour={"hang_after": -1}).status_code == 504
        frames = frames_of(post(url, stream=True, x_behaviour={"hang_after": 2}).text)
        assert "sent nothing for 0.5 s" in frames[-1]["error"]["message"]
        assert wait_until(lambda: all(entry["cancelled"] for entry in pair[0].log()))


def test_tokens_are_charged_as_the_upstream_counted_them() -> None:
    with running_upstream() as upstream, gateway_on(upstream, acme={"tokens_per_day": 1000}) as url:
        response = post(url, stream=True)
        before = int(response.headers["x-ratelimit-remaining-tokens"])
        response = post(url)
        usage = response.json()["usage"]
        left = int(response.headers["x-ratelimit-remaining-tokens"])
        assert left == 1000 - 2 * usage["total_tokens"]
        assert before < 1000
        # A broken answer is charged for what came; a refused one is not.
        post(url, x_behaviour={"status": 400, "body": {"message": "no"}})
        post(url, stream=True, x_behaviour={"die_after": 3})
        response = post(url)
        charged = left - int(response.headers["x-ratelimit-remaining-tokens"])
        assert usage["total_tokens"] < charged - usage["total_tokens"] < 200
