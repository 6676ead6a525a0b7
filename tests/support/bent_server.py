"""A real `maru-server` whose answers are bent on their way out. A command for ``ServerProcess(inside=…)``.

Arguments: the bend as JSON, then the server's own command line.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec

from maru_server import protocol as P
from maru_server.entry import main
from maru_server.service import Service


def bend(verb: str, *, first: int = 0, times: int = 1 << 30, copies: int = 1, **fields: object) -> tuple[str, ...]:
    """The command in front of the server's: of ``verb``'s successful answers, let ``first`` pass, then put ``fields`` into the
    grants of ``times`` of them, each grant ``copies`` times. A ``device`` is given in hex.
    """
    bent = {"verb": verb, "first": first, "times": times, "copies": copies, "fields": fields}
    return (sys.executable, __file__, json.dumps(bent))


def _install(verb: str, first: int, times: int, copies: int, fields: dict[str, Any]) -> None:
    if "device" in fields:
        fields["device"] = bytes.fromhex(fields["device"])
    dispatch = Service._dispatch
    answered = 0

    def bent(self: Service, identity: bytes, epoch: int, m: P.Request) -> P.Reply:
        nonlocal answered
        reply = dispatch(self, identity, epoch, m)
        if type(m).__name__ != verb or (isinstance(reply, P.Claimed) and not reply.results):
            return reply
        answered += 1
        if not first < answered <= first + times:
            return reply
        if isinstance(reply, P.Granted):
            return P.Granted([msgspec.structs.replace(g, **fields) for g in reply.grants * copies])
        assert isinstance(reply, P.Claimed)
        return P.Claimed(
            [P.ClaimResult(r.verdict, r.grant and msgspec.structs.replace(r.grant, **fields)) for r in reply.results]
        )

    Service._dispatch = bent  # type: ignore[method-assign]


if __name__ == "__main__":
    _install(**json.loads(sys.argv[1]))
    sys.argv = ["maru-server", *sys.argv[sys.argv.index("maru_server") + 1 :]]
    main()
