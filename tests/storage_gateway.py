"""A gateway process on an echo engine: FOLDER DATABASE_URL COUNTER_URL KEY_CACHE_S; prints its URL."""

import sys
from pathlib import Path

from factories_app import EchoBackend, make_app, served
from factories_storage import make_storage_settings

from app.operator_settings import CounterSettings


def main() -> None:
    folder, database_url, counter_url, key_cache_s = sys.argv[1:]
    settings = make_storage_settings(
        Path(folder),
        url=database_url,
        storage={"key_cache_s": float(key_cache_s)},
        counters=CounterSettings(url=counter_url, timeout_s=10.0, lease_ttl_s=5.0),
    )
    with served(make_app(settings, EchoBackend(step_s=0.02))) as url:
        print(url, flush=True)
        sys.stdin.read()  # until the test closes it


if __name__ == "__main__":
    main()
