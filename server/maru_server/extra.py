"""The extra ``server``: packages that ``maru-server`` and sidecars with a shared pool need, and nobody else."""

from __future__ import annotations

REMEDY = "in the project's clone: pip install '.[server]'"
_PACKAGES = ("zmq", "redis")


def is_missing(error: ImportError) -> bool:
    """Whether an import failed because the extra is not installed, rather than for a fault of ours."""
    return (error.name or "").partition(".")[0] in _PACKAGES
