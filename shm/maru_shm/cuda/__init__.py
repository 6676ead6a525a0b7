"""The CUDA driver API by ctypes, for both sides: the sidecar's transfer engine and the connector's overlapped loads.

Importing it loads no library and touches no GPU; :class:`~maru_shm.cuda.driver.CudaDriver` does.
"""
