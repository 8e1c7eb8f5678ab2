"""The evaluation harness: measures answer recall, tokens and time of a running gateway over HTTP."""

__all__: tuple[str, ...] = ()
