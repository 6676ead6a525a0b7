"""The benchmark table on a CPU engine: the program that measures on a GPU runs here in small, with a real sidecar."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS, TOKENS, CHUNK = 3, 512, 128
#: A Llama of four small layers: `load_format="dummy"` needs no weights, and it starts in seconds.
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "vocab_size": 1024,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "tie_word_embeddings": True, "bos_token_id": 1,
    "eos_token_id": 2, "torch_dtype": "float32",
}  # fmt: skip

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


def test_the_table_notes_a_row_that_fails_and_reports_every_pass_of_one_that_runs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    arguments = [
        "--dtype", "float32", "--vocab", "1000", "--docs", str(DOCUMENTS), "--tokens", str(TOKENS), "--out-tokens", "4",
        "--populate-out", "2", "--in-flight", "1,2", "--gpu-docs", "2", "--block-size", "32", "--chunk-tokens", str(CHUNK),
        "--batched-tokens", "256", "--eager", "--populate8", "2", "--gpu-memory", "0", "--settle", "0.5",
        "--skip-inductor-init", "--options", json.dumps({"maru.lookup_patience_ms": 5000}),
    ]  # fmt: skip
    table = [
        str(tmp_path),
        "pegaflow",
        "maru",
        "--out",
        str(tmp_path / "out"),
        "--gib",
        "0.125",
        "--suffix",
        "64",
        "--touch",
        "0.0625",
    ]
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "PEGAFLOW_SERVER": "/nowhere/pegaflow-server",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench/engine/table.py"), *table, "--", *arguments],
        env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "out" / "table.json").read_text())["rows"]
    assert "/nowhere/pegaflow-server" in rows["pegaflow"]["failed"]
    assert "failed" not in rows["maru"], (tmp_path / "out" / "logs.txt").read_text()[-4000:]
    passes = rows["maru"]["passes"]
    assert [(p["pass"], p["in_flight"]) for p in passes] == [
        ("warm-up", 2), ("populate", 1), ("own-hit", 1), ("hit", 1), ("hit", 2), ("suffix", 1), ("populate", 8),
    ]  # fmt: skip
    assert all(p["failures"] == 0 for p in passes)
    hits = [p for p in passes if p["pass"] in ("hit", "suffix")]
    assert [p["cached_tokens_mean"] for p in hits] == [TOKENS] * 3  # the most there is
    assert [p["same_as_reference"] for p in hits[:1]] == [DOCUMENTS]
    assert [p["cached_tokens_mean"] for p in passes if p["pass"] == "populate"] == [0, 0]
    assert rows["maru"]["status"]["failures"] == {}
    assert f"same {DOCUMENTS}/{DOCUMENTS}" in done.stdout
