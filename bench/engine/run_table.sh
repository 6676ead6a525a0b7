#!/bin/bash
# One benchmark run per name, on one machine, one after another: table.json and logs.txt in $OUT (default: ./bench-out).
#   bench/engine/run_table.sh MODEL_DIR NAME...
# Names: see rows.py. POOL_GIB: host memory given to each (default 62). LIMIT: seconds per row. BUDGET: seconds in all.
# SUFFIX: fresh tokens of the pass that overlap is for. TOUCH_GIB: host memory to use once before the first row. ARGS: more arguments for engine_bench.py.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec "${PYTHON:-python3}" "$here/table.py" "$@" --out "${OUT:-bench-out}" --gib "${POOL_GIB:-62}" --limit "${LIMIT:-240}" \
  --budget "${BUDGET:-0}" --suffix "${SUFFIX:-0}" --touch "${TOUCH_GIB:-0}" ${POOL_PATH:+--pool "$POOL_PATH"} -- ${ARGS:-}
