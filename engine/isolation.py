"""Tenants and the prefix cache: what is public, and the proof at start that nothing else is shared."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from engine.block_hash import num_equal_tokens
from engine.errors import EngineError
from engine.outputs import GenerateRequest, ModelInfo, RequestOutput
from engine.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_NUM_BLOCKS = 2
_MAX_STEPS = 10_000


class ChatEncoder(Protocol):
    """Renders and encodes messages as the served model wants them."""

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of the whole prompt."""
        ...


class TestedEngine(Protocol):
    """An engine without requests."""

    @property
    def info(self) -> ModelInfo: ...
    @property
    def has_unfinished(self) -> bool: ...
    def add_request(self, request: GenerateRequest) -> None: ...
    def step(self) -> list[RequestOutput]: ...


def encode_public_prefixes(chat: ChatEncoder, texts: Sequence[str]) -> list[list[int]]:
    """The token ids with which every prompt with one of these system messages begins, whatever follows.

    They are what two prompts with the same system message and different questions have in common: so a template may
    write the system message wherever it likes.
    """
    prefixes = []
    for text in texts:
        first, second = (
            chat.encode_chat([{"role": "system", "content": text}, {"role": "user", "content": question}])
            for question in ("a", "1 b")
        )
        prefixes.append(first[: num_equal_tokens(first, second)])
    return prefixes


def verify_isolation(engine: TestedEngine, *, expects_hits: bool = True) -> None:
    """Compute one prompt three times: a tenant must hit what it computed itself, and another tenant must not.

    ``engine`` is given up afterwards. Nothing is tested where the window or the pool is smaller than three blocks.

    Args:
        engine: without requests, over the model that is to be served.
        expects_hits: the prefix cache is on; where it is off nobody may hit anything.

    Raises:
        EngineError: the cache does not do what tenants are promised.
    """
    info = engine.info
    num_tokens = _NUM_BLOCKS * info.block_size + 1
    if num_tokens >= info.max_model_len or info.num_blocks <= _NUM_BLOCKS:
        return
    prompt = [index % info.vocab_size for index in range(num_tokens)]
    hits = [
        _num_cached_tokens(engine, f"isolation-{place}", prompt, salt)
        for place, salt in enumerate(("self-test-a", "self-test-a", "self-test-b"))
    ]
    first, same_tenant, other_tenant = hits
    if first or other_tenant:
        raise EngineError(f"the prefix cache is not isolated: {first} and {other_tenant} tokens of others were found")
    expected = _NUM_BLOCKS * info.block_size if expects_hits else 0
    if same_tenant != expected:
        raise EngineError(f"the prefix cache found {same_tenant} tokens of the same tenant, not {expected}")
    logger.info("prefix cache: the same tenant hits %d of %d tokens, another one 0", same_tenant, num_tokens)


def _num_cached_tokens(engine: TestedEngine, request_id: str, prompt: list[int], salt: str) -> int:
    engine.add_request(
        GenerateRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
            cache_salt=salt,
        )
    )
    for _ in range(_MAX_STEPS):
        for output in engine.step():
            if output.error is not None:
                raise EngineError(f"the self-test of the prefix cache failed: {output.error}")
            if output.finish_reason is not None:
                return output.num_cached_tokens
    raise EngineError(f"the self-test of the prefix cache did not end within {_MAX_STEPS} steps")
