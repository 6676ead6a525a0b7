"""Namespaces and chunk keys: what makes two pieces of KV cache interchangeable, and nothing else.

``chunk_key = blake2b-128(parent ‖ token ids (int32 LE) ‖ extra)``. The first parent is the *root*: a digest of everything
outside the tokens that shapes the bytes (model, revision, dtypes, quantisation, parallel geometry, format version, and
the request's LoRA and cache salt). ``extra`` holds what belongs to one chunk: multimodal hashes with their positions,
prompt embeddings. Anything but an exact match is a miss.

Keys chain, so a chunk's key names its whole prefix. They are computed once per request and extended as tokens come:
linear in tokens, and a lookup ships 16 bytes per chunk instead of the tokens.
"""

from __future__ import annotations

import array
import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence

import msgspec

from maru_shm.errors import PlatformUnsupported
from maru_shm.layout import KEY_BYTES

KEY_FORMAT = 1  #: part of every root; raise it when the derivation changes
_ROOT_PERSON = b"maru-root"
_CHUNK_PERSON = b"maru-chunk"
_SALT_PERSON = b"maru-salt"
_NAMESPACE_PERSON = b"maru-namespace"

if sys.byteorder != "little":  # token ids are hashed in native order
    raise PlatformUnsupported(f"byte order is {sys.byteorder}", "run on a little-endian machine")


def model_root(facts: Mapping[str, object]) -> bytes:
    """16-byte digest of the facts that outlive a request: model, revision, config digest, dtypes, parallel geometry.

    ``facts`` is serialised with sorted keys, so only content counts. Values: str, int, float, bool, None, lists, dicts.
    """
    encoded = msgspec.json.encode([KEY_FORMAT, facts], order="deterministic")
    return hashlib.blake2b(encoded, digest_size=KEY_BYTES, person=_ROOT_PERSON).digest()


def request_root(root: bytes, *, salt: str = "", lora: str = "") -> bytes:
    """The first parent of one request: the model's root, separated by cache salt and LoRA identity where it has them.

    A chained key inherits its root, so the salt separates every chunk, not the first alone.
    """
    if not salt and not lora:
        return root
    h = hashlib.blake2b(digest_size=KEY_BYTES, person=_SALT_PERSON)
    h.update(root)
    for part in (salt.encode(), lora.encode()):
        h.update(len(part).to_bytes(4, "little"))
        h.update(part)
    return h.digest()


def namespace_id(root: bytes, layout_signature: str, chunk_tokens: int, world_size: int) -> bytes:
    """16-byte digest naming the slabs two engines may share: same root, same bytes per chunk in the same order."""
    encoded = msgspec.json.encode([KEY_FORMAT, root.hex(), layout_signature, chunk_tokens, world_size])
    return hashlib.blake2b(encoded, digest_size=KEY_BYTES, person=_NAMESPACE_PERSON).digest()


def _no_extra(_chunk: int) -> bytes:
    return b""


class ChunkKeys:
    """The keys of one request's complete chunks, memoised and extended incrementally.

    ``keys`` grows by 16 bytes per complete chunk of ``chunk_tokens`` tokens. ``extra(i)`` gives chunk ``i``'s extra bytes
    (empty for plain text); it must be a function of the chunk alone.
    """

    __slots__ = ("_extra", "_parent", "chunk_tokens", "keys")

    def __init__(self, root: bytes, chunk_tokens: int, extra: Callable[[int], bytes] = _no_extra) -> None:
        self.chunk_tokens = chunk_tokens
        self.keys = bytearray()
        self._parent = root
        self._extra = extra

    def __len__(self) -> int:
        return len(self.keys) // KEY_BYTES

    def extend(self, tokens: Sequence[int], n_tokens: int | None = None) -> int:
        """Hash the complete chunks of ``tokens[:n_tokens]`` not yet hashed; returns how many chunks there are now.

        ``tokens`` is the request's whole token list: already hashed chunks are not read again.
        """
        total = (len(tokens) if n_tokens is None else n_tokens) // self.chunk_tokens
        done = len(self)
        if total <= done:
            return done
        size = self.chunk_tokens
        packed = memoryview(array.array("i", tokens[done * size : total * size])).cast("B")
        step = size * 4
        parent, blake2b = self._parent, hashlib.blake2b
        for i in range(total - done):
            h = blake2b(parent, digest_size=KEY_BYTES, person=_CHUNK_PERSON)
            h.update(packed[i * step : (i + 1) * step])
            if extra := self._extra(done + i):
                h.update(extra)
            parent = h.digest()
            self.keys += parent
        self._parent = parent
        return total
