"""The gateway: translates and guards; decides nothing about prompts or blocks."""

__all__: tuple[str, ...] = ()
