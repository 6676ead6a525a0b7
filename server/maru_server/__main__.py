"""``python -m maru_server``."""

from maru_server.cli import main

main(prog_name="maru-server")
