"""Names KV blocks by everything their content depends on, so that equal names mean reusable blocks.

The keys and values of a token depend on all tokens before it, on the weights and on how they were computed. A block's
hash is therefore a chain: ``H(parent hash, token ids, extra)``, where ``extra`` of the first block holds the weights,
tokenizer, template and numeric settings and the tenant's salt. Later blocks inherit them through their parent::

    block 0  H(none, t[0:16],  extra of this engine and tenant)  = h0
    block 1  H(h0,   t[16:32], b"")                              = h1
    block 2  H(h1,   t[32:48], b"")                              = h2

Two tenants with the same prompt differ in h0, hence in every block. A prefix that the operator has declared public
starts with an extra that names no tenant; the first block behind it then carries the tenant's::

    block 0  H(none, t[0:16],  extra of this engine)             = p0      public, the same for all tenants
    block 1  H(p0,   t[16:32], extra of this engine and tenant)  = h1      private, and so is all that follows

Text never enters a key: equal text may be different tokens, and different text (another template) the same ones.
"""

import hashlib
import struct
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple, NewType

BlockHash = NewType("BlockHash", bytes)
"""SHA-256 digest of a full block; only comparable inside one block size."""

NO_PARENT = BlockHash(bytes(32))
"""Stands for the parent of a first block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheKey:
    """What all blocks of one engine depend on besides their tokens. A change of any field empties the cache."""

    weights_digest: str
    tokenizer_digest: str
    template_version: str
    dtype: str
    """Of the KV cache and of the computation."""
    quantization: str
    """Of the weights and the KV cache, e.g. ``none`` or ``int8+kv_fp8``; another one gives other keys and values."""
    rope: str
    """Base, scaling and whatever else turns positions into angles."""

    def extra(self, cache_salt: str) -> bytes:
        """Extra data of the first block for one tenant.

        Raises:
            ValueError: ``cache_salt`` is empty: blocks without an owner would be shared by all such requests.
        """
        if not cache_salt:
            raise ValueError("cache_salt must not be empty: it keeps the prefix caches of tenants apart")
        return self._pack(cache_salt)

    def public_extra(self) -> bytes:
        """Extra data of the first block of a public prefix. No salt gives it: it has one field less."""
        return self._pack()

    def _pack(self, *salts: str) -> bytes:
        fields = (
            self.weights_digest,
            self.tokenizer_digest,
            self.template_version,
            self.dtype,
            self.quantization,
            self.rope,
            *salts,
        )
        # Lengths in front of the fields: ("ab", "c") and ("a", "bc") must not be the same bytes.
        parts = [field.encode("utf-8", "surrogatepass") for field in fields]
        return b"".join(struct.pack("<I", len(part)) + part for part in parts)


class HashedBlock(NamedTuple):
    """The hash of a full block together with all that went into it.

    A hash is only a fast way to find a candidate: tuple equality then compares what was hashed, so that a collision
    is a miss and never another prompt's keys and values.
    """

    hash: BlockHash
    parent: BlockHash
    token_ids: tuple[int, ...]
    extra: bytes


def hash_block(parent: BlockHash, token_ids: SequenceOf[int], extra: bytes = b"") -> BlockHash:
    """SHA-256 of a parent's hash, the block's token ids (each below 2**32) and the extra data."""
    tokens = struct.pack(f"<{len(token_ids)}I", *token_ids)
    return BlockHash(hashlib.sha256(parent + struct.pack("<II", len(tokens), len(extra)) + tokens + extra).digest())


def extend_hashed_blocks(
    hashed_blocks: list[HashedBlock],
    token_ids: SequenceOf[int],
    block_size: int,
    private_extra: bytes,
    *,
    public_extra: bytes = b"",
    num_public_blocks: int = 0,
) -> None:
    """Append the full blocks of ``token_ids`` that ``hashed_blocks`` does not hold yet; a partial block has no hash.

    Args:
        hashed_blocks: the chain so far, of the same tokens; grows in place.
        token_ids: all tokens of the sequence so far.
        block_size: tokens per block.
        private_extra: extra data of the first block that is not public, see ``CacheKey.extra``.
        public_extra: extra data of the first block where that one is public, see ``CacheKey.public_extra``.
        num_public_blocks: leading blocks that all tenants share.
    """
    for index in range(len(hashed_blocks), len(token_ids) // block_size):
        parent = hashed_blocks[-1].hash if hashed_blocks else NO_PARENT
        extra = b""
        if index == num_public_blocks:
            extra = private_extra
        elif index == 0:
            extra = public_extra
        block_token_ids = tuple(token_ids[index * block_size : (index + 1) * block_size])
        hashed_blocks.append(HashedBlock(hash_block(parent, block_token_ids, extra), parent, block_token_ids, extra))


def num_equal_tokens(a: SequenceOf[int], b: SequenceOf[int]) -> int:
    """Length of the common beginning of two token lists."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    return next(index for index in range(length) if a[index] != b[index])
