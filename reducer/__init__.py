"""The reducer: messages and passages in, a smaller prompt and the record of every decision out.

No HTTP, no engine. Heavy models are imported late; import the module you need, e.g. ``reducer.pipeline``.
"""

__all__: tuple[str, ...] = ()
