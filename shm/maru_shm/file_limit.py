"""This process's limit on the size of files (``RLIMIT_FSIZE``): past it the kernel says EFBIG, as some filesystems do."""

from __future__ import annotations

import resource


def remedy_for(nbytes: int) -> str | None:
    """What to do where a file of ``nbytes`` is past this process's limit; None where it is not."""
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if soft == resource.RLIM_INFINITY or nbytes <= soft:
        return None
    return f"raise this process's limit on file sizes, {soft} bytes (ulimit -f; in a systemd unit LimitFSIZE=)"
