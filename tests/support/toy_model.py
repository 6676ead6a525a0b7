"""A model whose KV cache can be checked byte by byte: all of it follows from the tokens.

The state at position p is a 64-bit hash chained over tokens 0..p. The KV of position p in (rank, layer) is that state expanded
to the layer's row size; the next token is a function of the last state. So two prompts share KV exactly as far as they share a
prefix, a block in the wrong place is wrong in every byte, and a generation can be replayed as a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

VOCABULARY = 997
_MASK = (1 << 64) - 1
_SEED = 0x9E3779B97F4A7C15
_STEP = 0xBF58476D1CE4E5B9
_MIX = 0x94D049BB133111EB


def _mix(x: int) -> int:
    """splitmix64's finaliser."""
    x = (x ^ (x >> 30)) * _STEP & _MASK
    x = (x ^ (x >> 27)) * _MIX & _MASK
    return x ^ (x >> 31)


class Chain:
    """The states of one token sequence, extended as tokens come."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self.states: list[int] = []
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        previous = self.states[-1] if self.states else _SEED
        self.tokens.append(token)
        self.states.append(_mix(previous ^ (token + 1) * _SEED & _MASK))

    def next_token(self) -> int:
        """What greedy sampling gives after the whole sequence."""
        return self.states[-1] % VOCABULARY

    def kv(self, start: int, end: int, *, rank: int, layer: int, shape: tuple[int, ...]) -> npt.NDArray[np.uint32]:
        """The KV of positions ``start`` to ``end`` (excluded): uint32, (end − start, *shape)."""
        words = int(np.prod(shape))
        lane = np.uint64(_mix(rank << 32 | layer)) + np.arange(words, dtype=np.uint64) * np.uint64(_SEED)
        x = np.array(self.states[start:end], dtype=np.uint64)[:, None] ^ lane[None, :]
        x = (x ^ (x >> np.uint64(30))) * np.uint64(_STEP)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX)
        return ((x >> np.uint64(16)) & np.uint64(0xFFFFFFFF)).astype(np.uint32).reshape(end - start, *shape)


def continuation(prompt: Sequence[int], n: int) -> list[int]:
    """The ``n`` tokens the model generates after ``prompt``."""
    chain = Chain(prompt)
    for _ in range(n):
        chain.append(chain.next_token())
    return chain.tokens[len(prompt) :]


def prompt(seed: int, n: int) -> list[int]:
    """A prompt of ``n`` tokens; different seeds differ from the first token on."""
    rng = np.random.default_rng(seed)
    return [int(t) for t in rng.integers(0, VOCABULARY, n)]
