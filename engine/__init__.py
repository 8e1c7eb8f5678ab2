"""The prefill engine: control plane (no torch) above, model execution (torch) below.

Nothing heavy is imported here; import the module you need, e.g. ``from engine.process import EngineClient``.
"""

__all__: tuple[str, ...] = ()
