"""The vLLM side of maru-sidecar: a KV connector that posts on shared-memory rings and never waits for I/O.

``connector.py`` is what vLLM loads; ``scheduler_half.py`` and ``worker_half.py`` do the work; ``link.py`` is the only module
that talks to the sidecar. Importing the package imports neither vLLM nor torch.
"""
