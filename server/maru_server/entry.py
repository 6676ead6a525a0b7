"""The command ``maru-server``: says what is missing where only the sidecar was installed, and turns errors into exit codes.

Nothing here needs the packages of the extra ``server``.
"""

from __future__ import annotations

import sys

from maru_server.extra import REMEDY, is_missing


def main() -> None:
    """The process's entry point; does not return."""
    try:
        from maru_server.cli import main as command
    except ImportError as e:
        if not is_missing(e):
            raise
        print(f"maru-server: the package {e.name!r} is not installed; {REMEDY}", file=sys.stderr)
        sys.exit(1)
    command(prog_name="maru-server")
