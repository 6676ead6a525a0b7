"""What the daemons' HTTP pages have in common: where they may listen, whom they answer, and Prometheus' text format.

A page on loopback answers only requests whose ``Host`` names loopback, so that a web page cannot read it through DNS rebinding.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from maru_shm.errors import ConfigError

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Sample(NamedTuple):
    """One line of ``/metrics``. ``type``: counter, gauge, histogram or summary; a histogram's samples are named ``…_bucket``
    (label ``le``), ``…_sum`` and ``…_count``."""

    name: str
    type: str
    help: str
    labels: Mapping[str, str]
    value: float


def parse_address(text: str) -> tuple[str, int]:
    """``host:port``, ``[v6]:port`` or ``:port`` (loopback). Raises :class:`ConfigError`.

    The host is an address or ``localhost``: a name would need a resolver at start-up.
    """
    host, colon, port = text.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    remedy = "write host:port, e.g. 127.0.0.1:9464 or [::1]:9464"
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"HTTP address {text!r}", remedy)
    if host == "localhost":
        host = "127.0.0.1"
    try:
        ipaddress.ip_address(host)
    except ValueError as e:
        raise ConfigError(f"HTTP address {text!r}", remedy) from e
    return host, int(port)


def names_loopback(host: str) -> bool:
    """Whether a ``Host`` header names this machine's loopback; an HTTP/1.0 probe may send none."""
    name = host.rpartition(":")[0] if host.count(":") == 1 or "]:" in host else host
    name = name.strip("[]").lower()
    if name in ("", "localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def render_metrics(samples: Iterable[tuple[str, str, str, Mapping[str, str], float]]) -> str:
    """Prometheus text format: samples grouped into families in order of first appearance, HELP and TYPE once each."""
    families: dict[str, list[str]] = {}
    for name, kind, text, labels, value in samples:
        family = _family(name, kind)
        lines = families.get(family)
        if lines is None:
            escaped = text.replace("\\", r"\\").replace("\n", r"\n")
            lines = families[family] = [f"# HELP {family} {escaped}", f"# TYPE {family} {kind}"]
        pairs = ",".join(f'{k}="{_escape(v)}"' for k, v in labels.items())
        lines.append(f"{name}{{{pairs}}} {_number(value)}" if pairs else f"{name} {_number(value)}")
    return "".join(line + "\n" for lines in families.values() for line in lines)


def _family(name: str, kind: str) -> str:
    if kind in ("histogram", "summary"):
        for suffix in ("_bucket", "_sum", "_count"):
            if name.endswith(suffix):
                return name.removesuffix(suffix)
    return name


def _escape(value: object) -> str:
    return str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("+Inf" if value > 0 else "-Inf")
    return str(int(value)) if float(value).is_integer() and abs(value) < 1 << 53 else repr(float(value))
