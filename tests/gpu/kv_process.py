"""A process that owns a KV cache in GPU memory, as an engine does: torch there, nothing of the sidecar.

:class:`KvProcess` is the test's end; :class:`_Engine` is the child's (CUDA does not survive a fork).
"""

from __future__ import annotations

import ctypes
import os
import time
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from maru_shm import segment as segments
from maru_shm.geometry import CUDA_VMM_HANDLE, KvRegion, RegionKind
from maru_shm.layout import Op, Role
from tests.support.client import Client
from tests.support.kv_cases import cases
from tests.support.kv_process import AnyKvProcess, random_bytes
from tests.support.served_process import serve


class KvProcess(AnyKvProcess):
    def __init__(self) -> None:
        super().__init__("tests.gpu.kv_process", timeout=120)

    def vmm(self, size: int) -> tuple[KvRegion, int]:
        """An exportable VMM allocation filled with 0x5A, and its descriptor here."""
        self.start("vmm", size)
        fd = recv_handle(self.pipe)
        return self.result(), fd


class _Engine:
    """The child's side: ``memory`` is the KV cache, one uint8 tensor per allocation."""

    def __init__(self, pipe: Connection) -> None:
        import torch

        self.pipe = pipe
        self.torch = torch
        torch.cuda.init()
        self.memory: list[Any] = []
        self.fence: Any = None
        self.weights: Any = None

    def allocate(self, *sizes: int) -> list[KvRegion]:
        from maru_connector.cuda_export import cuda_region

        self.memory = []
        self.torch.cuda.empty_cache()
        self.memory = [self.torch.empty(n, dtype=self.torch.uint8, device="cuda") for n in sizes]
        self.torch.cuda.synchronize()
        return [cuda_region(m.untyped_storage()) for m in self.memory]

    def fill(self, seed: int) -> list[int]:
        for i, m in enumerate(self.memory):
            m.copy_(self.torch.from_numpy(random_bytes(seed + i, m.numel())))
        self.torch.cuda.synchronize()
        return [m.numel() for m in self.memory]

    def set(self, value: int) -> None:
        for m in self.memory:
            m.fill_(value)
        self.torch.cuda.synchronize()

    def read(self) -> list[bytes]:
        return [m.cpu().numpy().tobytes() for m in self.memory]

    def open_fence(self, name: str, *, events: bool) -> str:
        from maru_connector import fence_cuda

        fd = os.open(f"/dev/shm{name}", os.O_RDWR)
        segment = segments.map_fd(fd, writable=True)
        os.close(fd)
        device = self.torch.device("cuda", self.torch.cuda.current_device())
        self.fence = fence_cuda.EventFence(segment, device.index) if events else fence_cuda.cuda_fence(segment, device)
        return type(self.fence).__name__

    def open_event_fence(self, name: str) -> str:
        return self.open_fence(name, events=True)

    def open_stream_fence(self, name: str) -> str:
        return self.open_fence(name, events=False)

    def step(self, step: int, cycles: int, value: int) -> None:
        """Launch a long kernel, then one that writes ``value`` everywhere, then the fence; returns before any has run."""
        self.torch.cuda._sleep(cycles)
        for m in self.memory:
            m.fill_(value)
        self.fence.after_step(step)

    def poll_fence(self) -> None:
        self.torch.cuda.synchronize()
        if hasattr(self.fence, "poll"):
            self.fence.poll()

    def close_fence(self) -> None:
        self.fence.close()
        self.fence.close()

    # --- as an engine attached to a running sidecar -----------------------------------------------------------------------
    def attach_sidecar(self, socket: str, case: str) -> str:
        """Both halves of an engine whose cache has the shape of ``case``; returns how the sidecar moves its bytes."""
        from maru_connector.fence_cuda import cuda_fence

        shape = next(c for c in cases() if c.name == case)
        cache: Any = SimpleNamespace(layout=shape.layout(self.allocate(*shape.allocations)))
        self.worker = Client(socket, cache=cache)
        self.scheduler = Client(socket, role=Role.SCHEDULER)
        self.fence = cuda_fence(self.worker.segment, self.torch.device("cuda", self.torch.cuda.current_device()))
        return self.worker.attached.transfer

    def after_step(self, step: int) -> None:
        self.fence.after_step(step)

    def hits(self, keys: bytes) -> int:
        return self.scheduler.hits(keys)

    def store(self, keys: bytes, table: npt.NDArray[np.int32], fence: int) -> tuple[str, int]:
        reply = self.worker.store(keys, table, fence=fence)
        return reply.state.name, reply.n_done

    def load(self, keys: bytes, table: npt.NDArray[np.int32], fence: int) -> tuple[str, int]:
        reply = self.worker.load(keys, table, fence=fence)
        return reply.state.name, reply.n_done

    def fetch(self, keys: bytes, table: npt.NDArray[np.int32], fence: int) -> tuple[int, str, int]:
        """Look up and load under that lookup's lease: chunks hit, state, chunks loaded."""
        ticket, found = self.scheduler.lookup(keys)
        lease = {"lease": ticket, "lease_session": self.scheduler.attached.session}
        reply = self.worker.finish(self.worker.post(Op.LOAD, keys, table, fence=fence, **lease))
        self.scheduler.release(ticket)
        return found.n_done, reply.state.name, reply.n_done

    def load_for_ever(self, keys: bytes, table: npt.NDArray[np.int32], fence: int) -> None:
        """Post loads until killed."""
        while True:
            self.worker.load(keys, table, fence=fence)

    def detach_sidecar(self) -> None:
        self.fence.close()
        self.worker.detach()
        for client in (self.worker, self.scheduler):
            client.close()

    def decode(self, seconds: float) -> list[float]:
        """Milliseconds per step of a memory-bound loop (bf16 matrix × vector over 2.7 GiB of weights) for ``seconds``."""
        torch = self.torch
        if self.weights is None:
            self.weights = torch.randn(24, 14336, 4096, dtype=torch.bfloat16, device="cuda")
        x = torch.randn(4096, 1, dtype=torch.bfloat16, device="cuda")
        graph = torch.cuda.CUDAGraph()
        for w in self.weights:
            w @ x
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for w in self.weights:
                w @ x
        times: list[float] = []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            marks[0].record()
            for _ in range(20):
                graph.replay()
            marks[1].record()
            marks[1].synchronize()
            times.append(marks[0].elapsed_time(marks[1]) / 20)
        return times

    def vmm(self, size: int) -> KvRegion:
        """Make an exportable VMM allocation filled with 0x5A; its descriptor goes ahead of the answer."""
        from maru_connector.cuda_export import call, gpu_uuid

        device = self.torch.cuda.current_device()
        self.torch.cuda.synchronize()
        properties = (ctypes.c_int * 10)(1, 1, 1, device, 0, 0, 0, 0, 0, 0)  # pinned, POSIX fd, on this device
        handle, address, fd = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_int(-1)
        call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size), properties, ctypes.c_uint64(0))
        call("cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(size), ctypes.c_size_t(0), ctypes.c_uint64(0),
             ctypes.c_uint64(0))  # fmt: skip
        call("cuMemMap", address, ctypes.c_size_t(size), ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        access = (ctypes.c_int * 3)(1, device, 3)
        call("cuMemSetAccess", address, ctypes.c_size_t(size), access, ctypes.c_size_t(1))
        call("cuMemsetD8_v2", address, ctypes.c_ubyte(0x5A), ctypes.c_size_t(size))
        call("cuMemExportToShareableHandle", ctypes.byref(fd), handle, 1, ctypes.c_uint64(0))
        packed = CUDA_VMM_HANDLE.pack(0, size)
        send_handle(self.pipe, fd.value, os.getppid())
        os.close(fd.value)
        return KvRegion(RegionKind.CUDA_VMM, address.value, size, packed, gpu_uuid(device))

    def refuse_expandable(self) -> str:
        """What exporting a storage in VMM memory says."""
        from maru_connector.cuda_export import cuda_region
        from maru_shm.errors import AttachRefused

        self.torch.cuda.memory._set_allocator_settings("expandable_segments:True")
        try:
            storage = self.torch.empty(64 << 20, dtype=self.torch.uint8, device="cuda").untyped_storage()
            cuda_region(storage)
        except AttachRefused as e:
            return str(e)
        finally:
            self.torch.cuda.memory._set_allocator_settings("expandable_segments:False")
        return ""


if __name__ == "__main__":
    serve(_Engine)
