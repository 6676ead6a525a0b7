"""The ``vllm.general_plugins`` entry point: makes ``"kv_connector": "MaruSidecarConnector"`` a known name."""

from __future__ import annotations

NAME = "MaruSidecarConnector"
MODULE = "maru_connector.connector"


def register() -> None:
    """Register the connector with vLLM. vLLM loads plugins in every process, and may do so twice: idempotent."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
