"""Other APIs on the same pipeline: a request becomes a chat completion, and its answer comes back in their shape."""

__all__: tuple[str, ...] = ()
