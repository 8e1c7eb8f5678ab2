"""The subcommands of ``firsttoken``, one module each, imported when they are called."""

__all__: tuple[str, ...] = ()
