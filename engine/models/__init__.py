"""Models in plain torch over paged KV: ``registry.load_model`` builds the one that a checkpoint asks for."""

__all__: tuple[str, ...] = ()
