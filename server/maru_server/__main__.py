"""``python -m maru_server``."""

from maru_server.entry import main

main()
