"""What the demos have in common: prompts, cold and warm runs, the table, the checks, and a bounded end."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SINGLE = ROOT / "examples" / "single"  #: the engine, its processes and the texts
CHUNK_TOKENS = 256
BLOCK_TOKENS = 32  #: of engine.py
REST_TOKENS = 16  #: of a prompt after its last whole chunk; less than a block
MIN_TOKENS = 1500
ANSWER_TOKENS = 24
POOL_SIZE = "1GiB"
KV_BYTES = 256 << 20  #: of the engine; one token of this model is 46,080 bytes


sys.path.insert(0, str(SINGLE))
from processes import EngineProcess, Sidecar  # noqa: E402

from maru_shm import segment as segments  # noqa: E402
from maru_shm.errors import MaruError  # noqa: E402


class DemoFailed(Exception):
    """A promise was not kept."""


@dataclass
class Row:
    """One prompt's way through the demo."""

    name: str
    prompt: list[int]
    cold: dict[str, Any] = field(default_factory=dict)
    reference: dict[str, Any] = field(default_factory=dict)
    warm: dict[str, Any] = field(default_factory=dict)
    cold_digest: str = ""
    warm_digest: str = ""

    @property
    def possible(self) -> int:
        """Tokens in whole chunks: the longest possible hit."""
        return len(self.prompt) // CHUNK_TOKENS * CHUNK_TOKENS


def say(text: str) -> None:
    print(f"demo: {text}", flush=True)


def load_texts(folder: Path) -> dict[str, str]:
    texts = {path.stem: path.read_text() for path in sorted(folder.glob("*.txt"))}
    if not texts:
        raise DemoFailed(f"no .txt file in {folder}")
    return texts


def trim(tokens: Sequence[int], name: str) -> list[int]:
    """The longest prefix of whole chunks plus ``REST_TOKENS``: local and external hits then end at the same token."""
    length = (len(tokens) - REST_TOKENS) // CHUNK_TOKENS * CHUNK_TOKENS + REST_TOKENS
    if length < MIN_TOKENS:
        raise DemoFailed(f"{name} gives a prompt of {length} tokens; at least {MIN_TOKENS} are needed")
    return list(tokens[:length])


def start_engine(model: Path, sidecar: Sidecar, directory: Path, name: str) -> EngineProcess:
    say(f"starting the {name} engine …")
    engine = EngineProcess(
        model, sidecar.socket, directory / f"{name}.log", "--kv-bytes", str(KV_BYTES), "--chunk-tokens", str(CHUNK_TOKENS)
    )
    say(f"{name} engine (pid {engine.pid}) is up after {engine.start_s:.0f} s")
    return engine


def warm_up(engine: EngineProcess) -> None:
    """A first small request pays for lazy initialisation, so that it is not counted as prefill."""
    engine.generate(engine.ask("tokenize", text="A first request warms up the engine.")["tokens"], max_tokens=2)


def slab_bytes(sidecar: Sidecar) -> int:
    """Bytes of one chunk."""
    return int(json.loads(sidecar.command("cache", "ls", "--limit", "1", "--format", "json"))[0]["bytes"])


def run_cold(engine: EngineProcess, texts: dict[str, str]) -> list[Row]:
    warm_up(engine)
    rows = []
    for name, text in texts.items():
        row = Row(name, trim(engine.ask("tokenize", text=text)["tokens"], name))
        [row.cold] = engine.generate(row.prompt, max_tokens=ANSWER_TOKENS)
        [row.reference] = engine.generate(row.prompt, max_tokens=ANSWER_TOKENS)
        row.cold_digest = engine.ask("digest", prompt=row.prompt)["digest"]
        rows.append(row)
        say(f"cold  {name}: {len(row.prompt)} tokens, first answer token after {row.cold['ttft_s']:.2f} s")
    return rows


def run_warm(engine: EngineProcess, rows: list[Row]) -> None:
    warm_up(engine)
    for row in rows:
        [row.warm] = engine.generate(row.prompt, max_tokens=ANSWER_TOKENS)
        row.warm_digest = engine.ask("digest", prompt=row.prompt)["digest"]
        say(f"warm  {row.name}: {row.warm['hit_tokens']} tokens loaded, first answer token after {row.warm['ttft_s']:.2f} s")


def print_table(rows: list[Row], bytes_per_token: float) -> None:
    heads = ("prompt", "tokens", "hit", "MB loaded", "TTFT cold", "TTFT warm", "ratio", "answer", "KV bytes")
    table: list[tuple[str, ...]] = [heads]
    for row in rows:
        cold, warm = row.cold["ttft_s"], row.warm["ttft_s"]
        table.append(
            (
                row.name, str(len(row.prompt)), str(row.warm["hit_tokens"]),
                f"{row.warm['hit_tokens'] * bytes_per_token / 1e6:.0f}", f"{cold * 1e3:.0f} ms", f"{warm * 1e3:.0f} ms",
                f"{cold / warm:.1f}x", "identical" if row.warm["tokens"] == row.reference["tokens"] else "DIFFERS",
                "identical" if row.warm_digest == row.cold_digest else "DIFFER",
            )
        )  # fmt: skip
    widths = [max(len(line[i]) for line in table) for i in range(len(heads))]
    print()
    for line in table:
        print(
            "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True)))
        )
    cold, warm = sum(r.cold["ttft_s"] for r in rows), sum(r.warm["ttft_s"] for r in rows)
    comparable = [row for row in rows if len(row.cold["tokens"]) == len(row.warm["tokens"])]
    print(f"\nTTFT over all prompts: {cold:.2f} s cold, {warm:.2f} s warm, {cold / warm:.1f} times faster")
    if comparable:
        same = sum(row.cold["tokens"] == row.warm["tokens"] for row in comparable)
        print(f"answers equal to the cold run's too, whose prefill has another shape: {same} of {len(comparable)}")
    print(flush=True)


def check(rows: list[Row]) -> None:
    for row in rows:
        if row.reference["hit_tokens"] != row.possible:
            raise DemoFailed(f"{row.name}: the reference hit {row.reference['hit_tokens']} tokens, expected {row.possible}")
        if row.warm["hit_tokens"] != row.possible:
            raise DemoFailed(f"{row.name}: {row.warm['hit_tokens']} tokens hit, {row.possible} possible")
        if row.warm["tokens"] != row.reference["tokens"]:
            raise DemoFailed(f"{row.name}: the warm answer differs from the reference")
        if row.warm_digest != row.cold_digest:
            raise DemoFailed(f"{row.name}: the restored KV differs from the computed KV")


def check_nothing_left(sidecar_pid: int, engine_pids: Sequence[int]) -> None:
    """No process, no shared-memory segment."""
    alive = [pid for pid in (sidecar_pid, *engine_pids) if segments.process_runs(pid)]
    if alive:
        raise DemoFailed(f"processes left behind: {alive}")
    for name, *_ in segments.list_names():
        with contextlib.suppress(MaruError):
            segment = segments.open_readonly(name)
            owner = segment.info.sidecar_pid
            segment.close()
            if owner == sidecar_pid:
                raise DemoFailed(f"shared memory left behind: {name}")


def wait_until_ready(sidecar: Sidecar) -> None:
    deadline = time.monotonic() + 60
    while not sidecar.answers():
        if time.monotonic() > deadline:
            raise DemoFailed(f"the sidecar was not ready within 60 s:\n{sidecar.log.read_text(errors='replace')[-4000:]}")
        time.sleep(0.1)


@contextlib.contextmanager
def logs_on_failure(directory: Path) -> Iterator[None]:
    """Print the end of every log if the body fails."""
    try:
        yield
    except BaseException:
        for log in sorted(directory.glob("*.log")):
            print(f"--- the end of {log.name}\n{log.read_text(errors='replace')[-3000:]}", file=sys.stderr)
        raise


def run_demo(description: str, pool: str, time_limit_s: int, demo: Callable[[Path, dict[str, str], Path], None]) -> None:
    """Run ``demo(model, texts, directory)`` with a time limit; the pool and the directory are gone afterwards."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", type=Path, default=ROOT / ".cache" / "models" / "smollm2-135m", help="checkpoint directory")
    parser.add_argument("--texts", type=Path, default=SINGLE / "texts", help="folder of .txt files, one prompt each")
    args = parser.parse_args()

    def out_of_time(*_: object) -> None:
        raise DemoFailed(f"not done within {time_limit_s} s")

    signal.signal(signal.SIGALRM, out_of_time)
    signal.alarm(time_limit_s)
    started = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="maru-demo-") as directory:
            demo(args.model, load_texts(args.texts), Path(directory))
    except DemoFailed as e:
        raise SystemExit(f"demo: FAILED: {e}") from e
    finally:
        signal.alarm(0)
        for path in (pool, f"{pool}.lock"):  # a pool outlives its sidecar by design; the demo's has no further use
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
    say(f"passed in {time.monotonic() - started:.0f} s: identical answers, every hit as long as possible, nothing left behind")
