"""The commands under ``firsttoken eval``, one module each."""

__all__: tuple[str, ...] = ()
