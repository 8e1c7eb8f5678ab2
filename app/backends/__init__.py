"""Where answers are generated: the protocol and its implementations; ``app.backends.base`` names the protocol."""

__all__: tuple[str, ...] = ()
