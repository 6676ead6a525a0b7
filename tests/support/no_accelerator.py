"""Let vLLM plan as it does on a machine whose accelerator it knows nothing about.

The platform decides defaults (block size, asynchronous scheduling). A CPU engine's would switch the asynchronous scheduler off.
"""

from __future__ import annotations


def pretend() -> None:
    """Must run before any other vLLM module is imported: they bind the platform at import."""
    import vllm.platforms
    from vllm.platforms.interface import UnspecifiedPlatform

    vllm.platforms._current_platform = UnspecifiedPlatform()
