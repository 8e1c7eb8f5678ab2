"""HTTP handlers: they read a request, call a service, and write its answer."""

__all__: tuple[str, ...] = ()
