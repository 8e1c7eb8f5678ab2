"""What a decode engine and a prefill engine say to each other: msgpack Structs, and the bytes of blocks behind them.

A decode engine asks for a group of blocks by hash, several groups at a time; the answer is one message with a frame for
the header and one for the bytes of all its blocks, one after the other. A prefill engine keeps no state of a transfer
but the lease, so each answer stands for itself.
"""

import hashlib

import msgspec

from engine.block_hash import BlockHash
from engine.received_blocks import BlockData


class FetchBlocks(msgspec.Struct, frozen=True, kw_only=True, tag="fetch"):
    """Send these blocks of an offer."""

    transfer_id: str
    ticket: int
    """Comes back with the answer."""
    hashes: list[bytes]


class ReleaseLease(msgspec.Struct, frozen=True, kw_only=True, tag="release"):
    """The blocks of an offer are not needed any more."""

    transfer_id: str
    is_fetched: bool
    """They have arrived; else they are given up."""


class BlocksFetched(msgspec.Struct, frozen=True, kw_only=True, tag="blocks"):
    """The blocks that were asked for follow, in that order, in the second frame."""

    ticket: int
    digests: list[bytes]
    """One for each, see ``block_digest``."""


class FetchRefused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """There is no such offer, or not all of these blocks are in it."""

    ticket: int


class AreYouThere(msgspec.Struct, frozen=True, kw_only=True, tag="ping"):
    """Needs no answer: that it can be sent at all is the answer."""


ConsumerMessage = FetchBlocks | ReleaseLease
ProducerMessage = BlocksFetched | FetchRefused | AreYouThere

encoder = msgspec.msgpack.Encoder()
consumer_message_decoder: msgspec.msgpack.Decoder[ConsumerMessage] = msgspec.msgpack.Decoder(ConsumerMessage)
producer_message_decoder: msgspec.msgpack.Decoder[ProducerMessage] = msgspec.msgpack.Decoder(ProducerMessage)


def block_digest(block_hash: BlockHash, data: BlockData) -> bytes:
    """128 bits over the bytes of a block and its name, so that right bytes under a wrong name do not pass either."""
    return hashlib.blake2b(data, digest_size=16, key=block_hash).digest()
