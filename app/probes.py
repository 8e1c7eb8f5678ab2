"""Addresses that are asked for every few seconds; nobody wants to read about them in traces and logs."""

PROBES = frozenset(
    (
        *("/metrics", "/health", "/livez", "/ping", "/ready", "/readyz", "/version"),
        *("/health/liveliness", "/health/liveness", "/health/readiness"),
    )
)
