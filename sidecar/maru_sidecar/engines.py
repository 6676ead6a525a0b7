"""The engines that are attached: which ranks have registered a KV cache, and that all halves of an engine agree.

An engine is the set of sessions that carry one ``engine_id``: a scheduler half and ``world_size`` workers, each its own
process. They must agree on everything that names the bytes (root, chunk size, geometry), or a lookup would answer for slabs
that another rank cannot use. Sessions are counted: one that leaves takes only its own rank along.

Used by the main thread alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from maru_shm import poolformat as P
from maru_shm.errors import AttachRefused, ProtocolViolation
from maru_shm.geometry import KvLayout
from maru_shm.keys import namespace_id
from maru_shm.layout import KEY_BYTES, Role
from maru_shm.messages import Attach, RefusalCode
from maru_sidecar.pool_header import GiB

MAX_WORLD = 4096
MAX_PIECES = 1 << 16
_SLAB_NAME_BYTES = 8  #: of the directory's heap, for each rank of each chunk
_INDEX_SHARE = 4  #: and that may be a quarter of the slab itself
MAX_ID = 256


class Refusal(AttachRefused):
    """An attach or a request that the sidecar answers with ``Refused(code, what, remedy)``."""

    def __init__(self, code: RefusalCode, what: str, remedy: str = "") -> None:
        super().__init__(what, remedy)
        self.code = code


@dataclass(slots=True)
class Engine:
    """One engine. ``namespace`` and ``identity`` come with its first worker and stay as long as any session does."""

    engine_id: str
    world: int
    root: bytes
    chunk_tokens: int
    label: str
    identity: str = ""
    namespace: bytes = b""
    block_tokens: int = 0
    slab_bytes: int = 0
    claims: dict[tuple[Role, int], int] = field(default_factory=dict)  #: (role, rank) → session
    registered: set[int] = field(default_factory=set)  #: ranks whose KV cache is imported

    @property
    def complete(self) -> bool:
        """Whether every rank has registered its KV cache: until then every lookup is a miss."""
        return len(self.registered) == self.world

    @property
    def blocks_per_chunk(self) -> int:
        return self.chunk_tokens // self.block_tokens


class EngineRegistry:
    """Engines by id."""

    def __init__(self, region_bytes: int, max_engines: int, max_pieces: int = MAX_PIECES) -> None:
        self._max_pieces = max_pieces
        self._region_bytes = region_bytes
        self._max_engines = max_engines
        self.engines: dict[str, Engine] = {}

    def holder(self, attach: Attach) -> int | None:
        """Session that holds the role and rank this attach asks for."""
        engine = self.engines.get(attach.engine_id)
        return engine.claims.get((attach.role, attach.rank)) if engine else None

    def claim(self, attach: Attach, session: int) -> Engine:
        """Check an attach against what is attached already and take its role and rank.

        Raises :class:`Refusal` naming both values where something disagrees. Undo with :meth:`leave`.
        """
        self._check_message(attach)
        engine = self.engines.get(attach.engine_id)
        if engine is None and len(self.engines) >= self._max_engines:
            raise Refusal(RefusalCode.LIMIT, f"{len(self.engines)} engines are attached", "raise limits.max_engines")
        if engine is not None:
            self._check_agreement(engine, attach)
        identity = attach.layout.identity if attach.layout else ""
        slab_bytes = self._check_geometry(attach, attach.layout) if attach.layout else 0
        if engine is None:
            engine = Engine(attach.engine_id, attach.world_size, attach.root, attach.chunk_tokens, attach.label)
            self.engines[attach.engine_id] = engine
        if attach.layout is not None and not engine.identity:
            engine.identity = identity
            engine.block_tokens = attach.layout.block_tokens
            engine.slab_bytes = slab_bytes
            engine.namespace = namespace_id(attach.root, identity, attach.chunk_tokens, attach.world_size)
        engine.claims[attach.role, attach.rank] = session
        return engine

    def registered(self, engine: Engine, rank: int) -> None:
        """This rank's KV cache is imported."""
        engine.registered.add(rank)

    def leave(self, engine: Engine, role: Role, rank: int, session: int) -> None:
        """Give a role and rank back; the engine is forgotten with its last session. Idempotent."""
        if engine.claims.get((role, rank)) != session:
            return
        del engine.claims[role, rank]
        if role is Role.WORKER:
            engine.registered.discard(rank)
            if not any(r is Role.WORKER for r, _ in engine.claims):
                engine.identity, engine.namespace = "", b""  # a restarted engine may bring another geometry
        if not engine.claims:
            self.engines.pop(engine.engine_id, None)

    @staticmethod
    def _check_message(attach: Attach) -> None:
        bad = RefusalCode.BAD_MESSAGE
        if not 0 < len(attach.engine_id) <= MAX_ID or len(attach.label) > MAX_ID:
            raise Refusal(bad, f"engine id of {len(attach.engine_id)} characters", f"1 to {MAX_ID} characters")
        if not 0 < attach.world_size <= MAX_WORLD or not 0 <= attach.rank < attach.world_size:
            raise Refusal(bad, f"rank {attach.rank} of {attach.world_size}", f"ranks count from 0, at most {MAX_WORLD} of them")
        if len(attach.root) != KEY_BYTES:
            raise Refusal(bad, f"root of {len(attach.root)} bytes", f"{KEY_BYTES} bytes, see keys.model_root")
        if not 0 < attach.chunk_tokens <= 1 << 20:
            raise Refusal(bad, f"chunks of {attach.chunk_tokens} tokens", "1 to 2^20 tokens")
        if (attach.layout is None) != (attach.role is Role.SCHEDULER):
            raise Refusal(
                bad, f"a {attach.role.value} with{'out' if attach.layout is None else ''} a KV layout", "workers bring one"
            )

    @staticmethod
    def _check_agreement(engine: Engine, attach: Attach) -> None:
        conflict = RefusalCode.CONFLICT
        who = f"engine {attach.engine_id!r}"
        if (attach.role, attach.rank) in engine.claims:
            raise Refusal(
                conflict, f"{attach.role.value} {attach.rank} of {who} is attached already", "give each engine its own id"
            )
        for name, ours, theirs in (
            ("world size", engine.world, attach.world_size),
            ("chunk_tokens", engine.chunk_tokens, attach.chunk_tokens),
            ("root", engine.root.hex(), attach.root.hex()),
            ("geometry", engine.identity, attach.layout.identity if attach.layout and engine.identity else engine.identity),
        ):
            if ours != theirs:
                raise Refusal(
                    conflict,
                    f"{who}: {name} is {_short(ours)} elsewhere, {_short(theirs)} in {attach.role.value} {attach.rank}",
                    "start all ranks with one configuration, or give each engine its own id",
                )

    def _check_geometry(self, attach: Attach, layout: KvLayout) -> int:
        bad = RefusalCode.BAD_GEOMETRY
        try:
            layout.check()
        except ProtocolViolation as e:
            raise Refusal(bad, e.what, e.remedy) from e
        if attach.chunk_tokens % layout.block_tokens:
            raise Refusal(
                bad,
                f"chunks of {attach.chunk_tokens} tokens, blocks of {layout.block_tokens}",
                "set maru.chunk_tokens to a multiple of the block size",
            )
        blocks = attach.chunk_tokens // layout.block_tokens
        pieces = blocks * len(layout.planes)
        if pieces > self._max_pieces:
            raise Refusal(
                RefusalCode.LIMIT,
                f"a chunk of {blocks} blocks in {len(layout.planes)} planes is {pieces} pieces",
                f"at most limits.max_pieces ({self._max_pieces}): lower maru.chunk_tokens",
            )
        slab_bytes = blocks * layout.block_bytes
        index, most = attach.world_size * _SLAB_NAME_BYTES, P.slab_stride(slab_bytes) // _INDEX_SHARE
        if index > most:
            raise Refusal(
                RefusalCode.LIMIT,
                f"a world of {attach.world_size} ranks takes {index} bytes of the directory for a slab of {slab_bytes} bytes",
                f"at most {most}, a quarter of the slab: raise maru.chunk_tokens",
            )
        if P.region_plan(self._region_bytes, slab_bytes)[0] < 1:
            raise Refusal(
                bad,
                f"a chunk of {attach.chunk_tokens} tokens is {slab_bytes} bytes, a pool region {self._region_bytes}",
                f"lower maru.chunk_tokens, or {_larger_regions(slab_bytes)}",
            )
        return slab_bytes


def _larger_regions(slab_bytes: int) -> str:
    """What gives a pool regions that hold such a slab. Unless configured, a region is a sixteenth of it, at most 1 GiB."""
    region = 1 << max(20, slab_bytes.bit_length())
    while P.region_plan(region, slab_bytes)[0] < 1:
        region *= 2
    size = f" or pool.size = {region >> 16}MiB" if region <= GiB else ""
    return f"make the pool anew with pool.region_size = {region >> 20}MiB{size}, or more"


def _short(value: object) -> str:
    text = str(value)
    return repr(text) if len(text) <= 80 else f"{text[:60]!r}… ({len(text)} characters)"
