"""The gateway: translates between HTTP and the reducer and the engine, and guards both.

Nothing heavy is imported here; import the module you need, e.g. ``from app.asgi import create_app``.
"""

__all__: tuple[str, ...] = ()
