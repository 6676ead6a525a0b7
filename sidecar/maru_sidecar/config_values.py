"""How a setting's value is written: as text (flag, variable, TOML string) or in TOML's types; and what to say otherwise."""

from __future__ import annotations

import re
import typing
from typing import Any, Literal

import msgspec

MODE_MAX = 0o777  #: no set-uid, set-gid or sticky bit: a socket or a pool has no use for them
MODE_FORM = "octal permission bits up to 0o777, e.g. 0o660 or '0660' (TOML reads a bare 660 as decimal)"
MODES = frozenset({"pool.mode", "control.mode"})
#: the settings that are bytes, and may have a unit
SIZES = frozenset({
    "pool.size", "pool.region_size", "cache.namespace_quota", "transfer.bytes_in_flight", "transfer.slice_bytes",
    "limits.segment_bytes", "limits.total_segment_bytes",
})  # fmt: skip
_UNITS = {
    "": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip
_SIZE = re.compile(r"^\s*(\d{1,30}(?:\.\d{1,30})?)\s*([A-Za-z]*)\s*$", re.ASCII)
_MODE = re.compile(r"^\s*(?:0[oO])?([0-7]{1,8})\s*$")


def parse_size(text: str) -> int:
    """Bytes of ``"64GiB"``, ``"512 MiB"``, ``"1.5GB"`` or ``"4096"``. Raises :class:`ValueError`."""
    match = _SIZE.match(text)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is no size")
    return int(float(match[1]) * _UNITS[match[2].upper()]) if "." in match[1] else int(match[1]) * _UNITS[match[2].upper()]


def parse_mode(text: str) -> int:
    """Permission bits of ``"660"``, ``"0660"`` or ``"0o660"``: octal, whatever stands before it. Raises :class:`ValueError`."""
    match = _MODE.match(text)
    if match is None or (mode := int(match[1], 8)) > MODE_MAX:
        raise ValueError(f"{text!r} is no permission bits")
    return mode


def value_of(key: str, kind: Any, value: object) -> object:
    """``value`` as a field of type ``kind`` wants it. Raises :class:`ValueError`; bounds are ``config_rules.py``'s matter."""
    if isinstance(value, str) and key in MODES:
        return parse_mode(value)
    try:
        if not isinstance(value, str):
            return msgspec.convert(value, kind)
        text = [part for part in value.replace(" ", "").split(",") if part] if typing.get_origin(kind) is tuple else value
        return msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError as e:
        if isinstance(value, str) and key in SIZES:
            return parse_size(value)
        raise ValueError(str(e)) from e


def wanted(key: str, kind: Any) -> str:
    """What a value of this key looks like, in the user's words."""
    if key in MODES:
        return MODE_FORM
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) is tuple:
        return "a list of whole numbers: [1000, 1001], or '1000,1001'"
    kinds = set(typing.get_args(kind)) or {kind}
    if int in kinds:
        return "a whole number; sizes read as '64GiB'" if key in SIZES else "a whole number"
    if float in kinds:
        return "a number"
    return "true or false" if bool in kinds else "text in quotes"
