"""The metadata server: which node's slab holds which chunk, and which node may write which region of shared memory.

It carries no KV bytes. Nodes share CXL memory; the server shares the directory between them. Its state is soft: nodes announce
their slabs again after it restarts, and a node without a server runs on its own cache.
"""

__version__ = "0.1.0"
