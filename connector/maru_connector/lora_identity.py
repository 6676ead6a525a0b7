"""Which adapter a request uses, as a name that other engines give to the same bytes, or one that nobody else gives.

Asked inside the scheduler: nothing here raises. An adapter whose files cannot be read, or that may not be what the workers
hold, is *private*: its chunks serve this engine process alone.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import Any

from maru_connector.file_samples import digest_of_files
from maru_connector.log import OnceLogger, get_logger

CONFIG = "adapter_config.json"  #: rank, alpha and targets: as much a part of the adapter as its weights
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")  #: what vLLM loads, and nothing else
_Stamp = tuple[tuple[str, int, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class _Known:
    stamp: _Stamp  #: of the files that were read; empty if there were none
    identity: str


class LoraIdentities:
    """One per scheduler half. An adapter is read when it is first seen and when it is loaded in place."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str, str, bool], _Known] = {}
        self._nonce = os.urandom(16).hex()
        self._once = OnceLogger(get_logger("maru_connector"))

    def of(self, lora_request: Any) -> str:
        """Identity of a request's adapter, empty without one.

        Workers read an adapter once, by its number, and again only for a request with ``load_inplace``. Files that change
        without one leave open which of the two a worker holds: from then on the adapter is private.
        """
        if lora_request is None:
            return ""
        path, name = str(getattr(lora_request, "lora_path", "") or ""), str(lora_request.lora_name)
        key = (int(lora_request.lora_int_id), name, path, bool(getattr(lora_request, "is_3d_lora_weight", False)))
        known = self._known.get(key)
        in_place = bool(getattr(lora_request, "load_inplace", False))
        try:
            directory = os.path.expanduser(path)
            stamp = _stamp(directory)
            if known is not None and known.stamp == stamp and not in_place:
                return known.identity
            digest = digest_of_files(os.path.join(directory, entry[0]) for entry in stamp)
            if _stamp(directory) != stamp:
                raise OSError(f"the files in {path} change while they are read")
        except (OSError, ValueError) as e:  # ValueError: a path with a null byte
            identity = self._private(key, ())
            if known is None:
                self._known[key] = _Known((), identity)
            self._warn(key, f"it cannot be read: {e}")
            return identity
        identity = f"weights:{digest}:{key[3]:d}"
        if known is not None and known.stamp != stamp and not in_place:
            identity = self._private(key, stamp)
            self._warn(key, "its files changed under the same name, and the workers may hold either; load it in place")
        self._known[key] = _Known(stamp, identity)
        return identity

    def _private(self, key: tuple[int, str, str, bool], stamp: _Stamp) -> str:
        text = repr((self._nonce, key, stamp)).encode(errors="backslashreplace")
        return "private:" + hashlib.blake2b(text, digest_size=16).hexdigest()

    def _warn(self, key: tuple[int, str, str, bool], why: str) -> None:
        self._once.warning(repr(key), "maru: what adapter %r computes is not shared with other engines: %s.", key[1], why)


def _stamp(directory: str) -> _Stamp:
    """(name, device, inode, size, mtime in ns) of the files an adapter is made of. Raises :class:`OSError`."""
    names = [CONFIG, *(name for name in WEIGHTS if os.path.isfile(os.path.join(directory, name)))]
    if len(names) == 1:
        raise FileNotFoundError(f"no {WEIGHTS[0]} in {directory!r}")
    stamp = []
    for name in names:
        s = os.stat(os.path.join(directory, name))
        stamp.append((name, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns))
    return tuple(stamp)
