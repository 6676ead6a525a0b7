"""Everything two processes must agree on: the segment's layout, rings, completion flags, keys, pool format, messages.

Each layout is written down once (``layout.py`` for the hot path, ``poolformat.py`` for the pool, ``messages.py`` for the
control socket) and both sides import it.
"""

__version__ = "0.1.0"
