"""A read-only look into a live segment: its header, its records, what completed, what does not move.

A record is read under its state word as under a sequence lock: word, fields, word again. Where it kept changing the view says
so (``torn``) and shows nothing else of it. Times are CLOCK_MONOTONIC ns in the segment, µs or s here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

from maru_shm import layout as L
from maru_shm import segment as S
from maru_shm.atomics import order_fence
from maru_shm.errors import ConfigError, MaruError, SegmentNotReady

_ATTEMPTS = 8


@dataclass(frozen=True, slots=True)
class RecordView:
    """One record as it was at one instant. ``state``, ``op`` and ``code`` are names, or the number where it has none."""

    segment: str
    index: int
    ticket: int  #: 0: never used
    state: str
    live: bool  #: not FREE
    finished: bool  #: terminal, or freed after its answer
    torn: bool = False
    op: str = ""
    code: str = ""
    label: str = ""
    n_keys: int = 0
    n_blocks: int = 0
    depth: int = 0
    lease: int = 0
    fence: int = 0
    cancel: bool = False
    copying: bool = False
    n_done: int = 0
    n_bytes: int = 0
    deadline: int = 0
    t_posted: int = 0
    t_accepted: int = 0
    t_first_copy: int = 0
    t_done: int = 0

    @property
    def age_s(self) -> float | None:
        """Seconds since it was posted."""
        return (time.monotonic_ns() - self.t_posted) / 1e9 if self.t_posted else None

    def row(self) -> dict[str, object]:
        """Plain values for a table or JSON, with the latency of each step in µs (None: not taken yet)."""
        last_before_done = self.t_first_copy or self.t_accepted
        return {
            "segment": self.segment, "index": self.index, "ticket": self.ticket, "op": self.op, "state": self.state,
            "code": self.code if self.finished else "", "label": self.label, "keys": self.n_keys, "blocks": self.n_blocks,
            "depth": self.depth, "done": self.n_done, "bytes": self.n_bytes, "age_s": _rounded(self.age_s, 3),
            "accept_us": _us(self.t_posted, self.t_accepted), "first_copy_us": _us(self.t_accepted, self.t_first_copy),
            "copy_us": _us(last_before_done, self.t_done), "total_us": _us(self.t_posted, self.t_done),
            "cancel": self.cancel, "copying": self.copying, "lease": self.lease, "fence": self.fence, "torn": self.torn,
        }  # fmt: skip


def _us(start: int, end: int) -> float | None:
    return round((end - start) / 1e3, 1) if start and end >= start else None


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _name(kind: type[L.State] | type[L.Op] | type[L.Code] | type[L.SidecarState], value: int) -> str:
    try:
        return kind(value).name
    except ValueError:
        return f"?{value}"


class SegmentView:
    """A segment mapped read-only; close it, or use it as a context manager."""

    def __init__(self, segment: S.Segment, name: str) -> None:
        self._segment = segment
        self._words = segment.words
        self._shape = segment.shape
        self._seen: dict[int, int] = {}  # record index → last ticket reported as complete
        self.name = name
        self.info = segment.info

    @property
    def sidecar_alive(self) -> bool:
        """Whether the process that made the segment runs: same pid, same start time."""
        return S.process_runs(self.info.sidecar_pid, self.info.sidecar_start)

    @property
    def client_alive(self) -> bool:
        """Whether a process with the client's pid runs (the segment does not hold its start time)."""
        return S.process_runs(self.info.client_pid)

    @property
    def answers_to_come(self) -> bool:
        """Whether an answer may follow though the session has ended: something was accepted, by a sidecar that runs."""
        accepted = any(self._word(i) & 0xFF == L.State.ACCEPTED for i in range(self._shape.n_records))
        return accepted and self.sidecar_alive

    # --- header -----------------------------------------------------------------------------------------------------------
    def summary(self) -> dict[str, object]:
        """One line about the segment."""
        words = self._words
        head, tail = words[L.WORD_SQ_HEAD], words[L.WORD_SQ_TAIL]
        now = time.monotonic_ns()
        return {
            "segment": self.name, "role": self.info.role.value, "session": self.info.session,
            "sidecar": f"{self.info.sidecar_pid}{'' if self.sidecar_alive else ' dead'}",
            "client": f"{self.info.client_pid}{'' if self.client_alive else ' dead'}",
            "state": _name(L.SidecarState, words[L.WORD_SIDECAR_STATE]), "head": head, "tail": tail, "queued": tail - head,
            "in_flight": sum(self._word(i) & 0xFF in (L.State.POSTED, L.State.ACCEPTED) for i in range(self._shape.n_records)),
            "armed": words[L.WORD_ARMED] == 1, "sidecar_beat_s": round((now - words[L.WORD_SIDECAR_BEAT]) / 1e9, 3),
            "client_beat_s": round((now - words[L.WORD_CLIENT_BEAT]) / 1e9, 3), "step": words[L.WORD_CLIENT_STEP],
            "fence": words[L.WORD_FENCE],
        }  # fmt: skip

    def details(self) -> dict[str, object]:
        """Sections: the static header, the mutable words, records by state."""
        info, shape = self.info, self._shape
        states: dict[str, int] = {}
        for i in range(shape.n_records):
            name = _name(L.State, self._word(i) & 0xFF)
            states[name] = states.get(name, 0) + 1
        return {
            "segment": {
                "name": self.name, "abi": f"{info.abi[0]}.{info.abi[1]}", "instance": info.instance,
                "generation": f"{info.generation:016x}", "session": info.session, "role": info.role.value,
                "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(info.created_ns / 1e9)),
            },
            "processes": {
                "sidecar_pid": info.sidecar_pid, "sidecar_alive": self.sidecar_alive, "client_pid": info.client_pid,
                "client_alive": self.client_alive,
            },
            "shape": {
                "slots": shape.n_slots, "records": shape.n_records, "cell_bytes": shape.cell_bytes,
                "reply_bytes": shape.reply_bytes, "total_bytes": shape.total_bytes,
            },
            "words": {k: v for k, v in self.summary().items() if k not in ("segment", "role", "session", "sidecar", "client")},
            "records": states,
        }  # fmt: skip

    # --- records ----------------------------------------------------------------------------------------------------------
    def _at(self, index: int) -> int:
        return self._shape.records_offset + index * L.RECORD_BYTES

    def _word(self, index: int) -> int:
        return self._words[self._at(index) // 8 + L.STATE_WORD]

    def record(self, index: int) -> RecordView:
        """Record ``index`` as it was at one instant."""
        base, data = self._at(index), self._segment.bytes
        word = self._word(index)
        for _ in range(_ATTEMPTS):
            order_fence()  # SYNC POINT: acquire; the fields were written before the word
            request = L.REQUEST.unpack_from(data, base + L.REQUEST_OFFSET)
            reply = L.REPLY.unpack_from(data, base + L.REPLY_OFFSET)
            label = bytes(data[base + L.LABEL_OFFSET : base + L.LABEL_OFFSET + L.LABEL_BYTES])
            cancel, copying = self._words[base // 8 + L.CANCEL_WORD], self._words[base // 8 + L.COPYING_WORD]
            order_fence()
            before, word = word, self._word(index)
            if word == before:
                break
        else:
            return self._header_only(index, word)
        own, op, _, lease, fence, _, depth, n_keys, n_blocks, t_posted = request
        if own != word >> 8:  # FREE, and being filled for its next ticket
            return self._header_only(index, word)
        code, n_done, n_bytes, t_accepted, t_first_copy, t_done, deadline, _, _ = reply
        state = word & 0xFF
        if state == L.State.POSTED:  # the reply line still holds the answer to the record's previous ticket
            code = n_done = n_bytes = t_accepted = t_first_copy = t_done = deadline = copying = 0
        return RecordView(
            segment=self.name, index=index, ticket=word >> 8, state=_name(L.State, state), live=state != L.State.FREE,
            finished=state >= L.State.DONE or (state == L.State.FREE and t_done != 0), op=_name(L.Op, op),
            code=_name(L.Code, code), label=label.rstrip(b"\0").decode(errors="replace"), n_keys=n_keys, n_blocks=n_blocks,
            depth=depth, lease=lease, fence=fence, cancel=cancel != 0, copying=copying != 0, n_done=n_done, n_bytes=n_bytes,
            deadline=deadline, t_posted=t_posted, t_accepted=t_accepted, t_first_copy=t_first_copy, t_done=t_done,
        )  # fmt: skip

    def _header_only(self, index: int, word: int) -> RecordView:
        state = word & 0xFF
        live = state != L.State.FREE
        return RecordView(
            self.name, index, word >> 8, _name(L.State, state), live, finished=state >= L.State.DONE, torn=word != 0
        )

    def records(self) -> Iterator[RecordView]:
        """Every record of the table, used or not."""
        return (self.record(i) for i in range(self._shape.n_records))

    def skip_completed(self) -> None:
        """Forget what is complete by now; :meth:`newly_completed` starts after it."""
        self._seen = {r.index: r.ticket for r in self.records() if r.finished and r.ticket}

    def newly_completed(self) -> list[RecordView]:
        """Records that reached their answer since the last call, oldest answer first."""
        found = []
        for index in range(self._shape.n_records):
            word = self._word(index)
            if word >> 8 == self._seen.get(index, 0) or word & 0xFF in (L.State.POSTED, L.State.ACCEPTED):
                continue
            record = self.record(index)
            if record.finished and not record.torn:
                self._seen[index] = record.ticket
                found.append(record)
        return sorted(found, key=lambda r: r.t_done)

    def stuck(self, seconds: float) -> list[dict[str, object]]:
        """Rows saying what does not move: dead processes, tickets without an answer for ``seconds``, copies left open."""
        rows: list[dict[str, object]] = []
        dead = []
        if not self.sidecar_alive:
            dead.append(f"sidecar {self.info.sidecar_pid} is dead")
        if not self.client_alive:
            dead.append(f"client {self.info.client_pid} is dead")
        if dead:
            rows.append({"segment": self.name, "what": ", ".join(dead)})
        for record in self.records():
            pending = record.state in (L.State.POSTED.name, L.State.ACCEPTED.name)
            age = record.age_s or 0.0
            why = []
            if pending and (dead or age > seconds):
                why.append("not accepted" if record.state == L.State.POSTED.name else "accepted, not answered")
            if record.copying and (why or dead or not pending):
                why.append("a copy may still touch the client's memory")
            if record.cancel and why:
                why.append("cancel asked")
            if record.state.startswith("?"):
                why.append("state is none of the protocol's")
            if why:
                row = record.row()
                rows.append(
                    {k: row[k] for k in ("segment", "index", "ticket", "op", "state", "label", "age_s")}
                    | {"what": ", ".join(why)}
                )
        return rows

    def close(self) -> None:
        self._segment.close()

    def __enter__(self) -> SegmentView:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def open_named(name: str) -> SegmentView:
    """Map one segment. Raises a :class:`~maru_shm.errors.SegmentError` that says why not."""
    return SegmentView(S.open_readonly(name), name)


def open_all(instance: str | None = None) -> Iterator[tuple[str, SegmentView | MaruError]]:
    """Every segment in ``/dev/shm``: mapped, or the error that says why not. One that vanished meanwhile is left out."""
    for name, _, _, _ in list(S.list_names(instance)):
        try:
            yield name, open_named(name)
        except SegmentNotReady as e:
            if os.path.exists(S.SHM_DIR + name):
                yield name, e
        except MaruError as e:
            yield name, e


def resolve(text: str, instance: str | None = None) -> str:
    """The segment's name for a name, with or without slash, or a session number that only one segment (of an instance) has."""
    names = [name for name, *_ in S.list_names(instance)]
    wanted = "/" + text.removeprefix("/")
    if wanted in names:
        return wanted
    matching = [name for name in names if name.rpartition(".")[2] == text]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise ConfigError(f"{len(matching)} segments have session {text}", "give the whole name: " + " ".join(matching))
    raise SegmentNotReady(f"segment {text} does not exist", "list live segments with `maru-ring ls`")
