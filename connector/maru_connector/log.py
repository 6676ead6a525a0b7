"""Logging through vLLM's own set-up, and each condition once: a connector that logs per step drowns its engine."""

from __future__ import annotations

import logging


def get_logger(name: str) -> logging.Logger:
    """vLLM's logger where vLLM is installed (its format, level and ranks), the standard one elsewhere."""
    try:
        from vllm.logger import init_logger
    except ImportError:
        return logging.getLogger(name)
    logger: logging.Logger = init_logger(f"vllm.{name}")
    return logger


class OnceLogger:
    """Says each thing once. ``again`` arms it anew, for conditions that end and come back."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._said: set[str] = set()

    def log(self, level: int, key: str, message: str, *args: object) -> bool:
        """Log under ``key`` unless it was said; True if it was logged now."""
        if key in self._said:
            return False
        self._said.add(key)
        self._logger.log(level, message, *args, stacklevel=3)
        return True

    def info(self, key: str, message: str, *args: object) -> bool:
        return self.log(logging.INFO, key, message, *args)

    def warning(self, key: str, message: str, *args: object) -> bool:
        return self.log(logging.WARNING, key, message, *args)

    def again(self, key: str) -> None:
        """Let ``key`` be said once more."""
        self._said.discard(key)
