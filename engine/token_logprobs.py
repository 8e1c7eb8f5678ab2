"""What is told about the tokens of an output beside their text; crosses the border of the engine process."""

import msgspec


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One token and how likely the model found it."""

    token_id: int
    logprob: float
    text: bytes
    """What it adds to the text; for tokens that add nothing, such as an end of turn, what it is called."""


class PositionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """The token chosen at one position of the output, and the most likely ones there, most likely first."""

    chosen: TokenLogprob
    top: list[TokenLogprob]
