"""``python -m maru_sidecar`` is ``maru-sidecar``."""

from maru_sidecar.cli import main

main()
