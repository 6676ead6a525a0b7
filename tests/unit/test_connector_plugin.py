"""The plugin makes the connector known to vLLM by name."""

from __future__ import annotations

import subprocess
import sys

import pytest


def test_importing_the_package_imports_neither_vllm_nor_torch() -> None:
    code = "import sys, maru_connector, maru_connector.plugin; print({'vllm', 'torch', 'maru_sidecar'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_registering_twice_is_harmless_and_the_name_leads_to_the_class() -> None:
    pytest.importorskip("vllm")
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from maru_connector import plugin

    plugin.register()
    plugin.register()
    found = KVConnectorFactory.get_connector_class_by_name(plugin.NAME)
    assert found.__name__ == "MaruSidecarConnector"
