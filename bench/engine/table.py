"""The table: one benchmark run per row on one machine, one after another, and what came of it in one file.

    python bench/engine/table.py MODEL_DIR none engine_only maru maru_overlap lmcache_mp --out bench-out
    python bench/engine/table.py --summary a/table.json b/table.json

``--out`` gets ``table.json`` (every row's report) and ``logs.txt`` (the end of every log), both written anew after each row.
A row that fails or runs into its limit is noted, and the next one starts; so is one for which ``--budget`` leaves too little.
vLLM is imported once, here, and each engine's process is forked: 20 s a row. The first engine of a machine also compiles its
model (22 s on an H200): compare the starts of later ones.
Arguments after ``--`` go to ``engine_bench.py``. Rows: see ``rows.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import runpy
import shutil
import signal
import socket as sockets
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from rows import Row, make_row, server_command  # noqa: E402
from table_summary import hidden_share, summary  # noqa: E402

SERVER_TIMEOUT_S = 150.0
LEAST_S = 40.0  #: a row that has less left is not begun
STOP_S = 10.0
TOUCHERS = 8


def import_vllm() -> None:
    """What every engine's process imports before it is given its arguments: 20 s where the files are cold."""
    import engine_bench  # noqa: F401
    import vllm.engine.arg_utils
    import vllm.sampling_params
    import vllm.v1.engine.async_llm  # noqa: F401


class Table:
    def __init__(self, args: argparse.Namespace, bench: Sequence[str]) -> None:
        self.args, self.bench = args, list(bench)
        self.begin = time.monotonic()
        self.out = Path(args.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.work = Path(tempfile.mkdtemp(prefix="maru-table-"))
        self.socket = str(self.work / "sidecar.sock")
        self.pool = args.pool or f"/dev/shm/maru-bench-pool-{os.getpid()}"
        self.rows: dict[str, dict[str, Any]] = {}

    @property
    def left(self) -> float:
        return self.args.budget - (time.monotonic() - self.begin) if self.args.budget else math.inf

    def run(self, names: Sequence[str]) -> None:
        if self.args.touch:
            begin = time.monotonic()
            touch(self.args.touch)
            print(f"touched {self.args.touch:g} GiB in {time.monotonic() - begin:.1f} s", flush=True)
        for name in names:
            if self.left < LEAST_S:
                self._note(name, {"failed": f"not begun: {self.left:.0f} s left"})
                continue
            begin = time.monotonic()
            row = make_row(name, gib=self.args.gib, suffix=self.args.suffix)
            try:
                result = self._row(row)
            except Exception as e:  # noqa: BLE001 - this row's result; the next one is another program's
                result = {"failed": f"{type(e).__name__}: {e}"}
            self._note(name, {**result, "row_s": round(time.monotonic() - begin, 1)})

    def _note(self, name: str, result: dict[str, Any]) -> None:
        self.rows[name] = result
        merged = {"model": self.args.model, "gib": self.args.gib, "machine": machine(), "rows": self.rows}
        (self.out / "table.json").write_text(json.dumps(merged))
        with open(self.out / "logs.txt", "w", errors="replace") as logs:
            for log in sorted(self.work.glob("*.log")):
                lines = log.read_text(errors="replace").splitlines()
                logs.write(f"=== {log.name} ({len(lines)} lines)\n")
                logs.write("\n".join(line[:400] for line in lines[-self.args.log_lines :]) + "\n")
        print(summary({name: result}), flush=True)

    def _row(self, row: Row) -> dict[str, Any]:
        log, report = self.work / f"{row.name}.log", self.work / f"{row.name}.json"
        arguments = [
            "--name", row.name, "--connector", row.connector, "--model", self.args.model, "--host-gib", str(self.args.gib),
            "--room", str(self.args.suffix), "--json", str(report), "--keep-answers", *self.bench, *row.arguments,
        ]  # fmt: skip
        result: dict[str, Any] = {}
        with self._server(row, result):
            limit = min(self.args.limit, self.left - STOP_S)
            code = self._engine(row, arguments, log, limit)
            if code != 0:
                result["failed"] = f"exit {code}" if code is not None else f"cut off after {limit:.0f} s"
            if row.server.startswith("maru"):
                result["status"] = self._status()
        if report.exists():
            result |= json.loads(report.read_text())
        return result

    # --- an engine's process ------------------------------------------------------------------------------------------------
    def _engine(self, row: Row, arguments: list[str], log: Path, limit: float) -> int | None:
        import engine_bench

        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.setsid()
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                with open(log, "ab") as out:
                    os.dup2(out.fileno(), 1)
                    os.dup2(out.fileno(), 2)
                os.environ.update(row.environment)
                os.environ["MARU_SOCKET"] = self.socket
                put_first(row.path)
                engine_bench.main(arguments)
                code = 0
            except BaseException:  # noqa: BLE001 - nothing may return into the parent's program
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)

        def poll() -> int | None:
            done, status = os.waitpid(pid, os.WNOHANG)
            return os.waitstatus_to_exitcode(status) if done else None

        return wait_or_end(pid, poll, limit)

    # --- a server beside it -------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def _server(self, row: Row, result: dict[str, Any]) -> Iterator[None]:
        """``result`` gets how long the server took to be ready."""
        if not row.server:
            yield
            return
        command, port = server_command(row.server, gib=self.args.gib, socket=self.socket, pool=self.pool)
        begin = time.monotonic()
        with open(self.work / f"{row.name}-server.log", "ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )  # fmt: skip
        try:
            while not (accepts(port) if port else self._status()):
                if process.poll() is not None or time.monotonic() - begin > min(SERVER_TIMEOUT_S, self.left):
                    raise RuntimeError(f"the server did not come up in {time.monotonic() - begin:.0f} s")
                time.sleep(0.2)
            result["server_start_s"] = round(time.monotonic() - begin, 1)
            yield
        finally:
            end(process.pid, process.poll)
            for path in (self.pool, f"{self.pool}.lock"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)

    def _status(self) -> dict[str, Any]:
        """The sidecar's, once it is ready; empty otherwise."""
        command = [sys.executable, "-m", "maru_sidecar", "status", "--socket", self.socket, "--format", "json"]
        asked = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        status: dict[str, Any] = json.loads(asked.stdout) if asked.returncode == 0 else {}
        return status if status.get("sidecar", {}).get("state") == "READY" else {}


def put_first(path: str) -> None:
    """What starting Python with ``path`` first in its path would do, for packages nothing has imported yet."""
    if not path:
        return
    here = {entry.name.partition(".")[0] for entry in Path(path).iterdir()} - {"sitecustomize"}
    if loaded := here & sys.modules.keys():
        raise RuntimeError(f"{sorted(loaded)} of {path} are imported already, from elsewhere")
    sys.path.insert(0, path)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH", "")]))
    if Path(path, "sitecustomize.py").exists():
        runpy.run_path(str(Path(path, "sitecustomize.py")))


def wait_or_end(pid: int, poll: Callable[[], int | None], limit: float) -> int | None:
    """The exit status; None if the process group had to be ended at the limit. Nothing of it is left either way."""
    deadline = time.monotonic() + limit
    try:
        while (code := poll()) is None and time.monotonic() < deadline:
            time.sleep(0.1)
        if code is None:
            end(pid, poll)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    return code


def end(pid: int, poll: Callable[[], int | None]) -> None:
    """SIGTERM to a process group, SIGKILL if its leader is still there after ten seconds."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + STOP_S
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, number)
        while poll() is None:
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        else:
            return


def accepts(port: int) -> bool:
    with contextlib.suppress(OSError), sockets.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


def touch(gib: float) -> None:
    """Use so much host memory once. A virtual machine may get it from its host only then, at 3 GiB/s: the rows that come first
    would pay for it, and their engines be slow for as long (H200 guest: CUDA graphs captured at a third of the rate).
    """
    size = int(gib * (1 << 30)) // TOUCHERS

    def fill(directory: str) -> None:
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, size)

    with ThreadPoolExecutor(TOUCHERS) as threads:
        list(threads.map(fill, ["/dev/shm"] * TOUCHERS))


def machine() -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    return "no GPU"


def arguments() -> tuple[argparse.Namespace, list[str]]:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--summary", nargs="+", metavar="TABLE_JSON", help="print what these files hold, and do nothing else")
    p.add_argument("model", nargs="?", help="directory with a config.json")
    p.add_argument("row", nargs="*")
    p.add_argument("--out", default="bench-out")
    p.add_argument("--gib", type=float, default=62, help="host memory for each cache")
    p.add_argument("--pool", help="the sidecar's pool file; it is removed after each row")
    p.add_argument("--suffix", type=int, default=0, help="fresh tokens after a hit, for engine_only, maru and maru_overlap")
    p.add_argument("--limit", type=float, default=240, help="seconds for one row's engine")
    p.add_argument("--budget", type=float, default=0, help="seconds for all rows; 0: no bound")
    p.add_argument("--touch", type=float, default=0, help="GiB of host memory to use once before the first row")
    p.add_argument("--log-lines", type=int, default=60)
    argv, bench = sys.argv[1:], []
    if "--" in argv:
        at = argv.index("--")
        argv, bench = argv[:at], argv[at + 1 :]
    return p.parse_args(argv), bench


def main() -> None:
    args, bench = arguments()
    if args.summary:
        rows: dict[str, Any] = {}
        for path in args.summary:
            rows |= json.loads(Path(path).read_text())["rows"]
        print(summary(rows))
        print(hidden_share(rows))
        return
    for name in args.row:
        make_row(name, gib=args.gib, suffix=args.suffix)  # a misspelt name is said before anything runs
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers and engines go with this process
    table = Table(args, bench)
    import_vllm()
    try:
        table.run(args.row)
    finally:
        shutil.rmtree(table.work, ignore_errors=True)
    print(hidden_share(table.rows))


if __name__ == "__main__":
    main()
