#!/bin/bash
# One benchmark run per name, on one machine, one after another; a JSON file each in $OUT (default: ./bench-out).
#   bench/engine/run_table.sh MODEL_DIR NAME...
# Names: none engine_only maru maru_overlap maru_sync_store lmcache_mp offloading simple pegaflow
# ARGS: more arguments for engine_bench.py. Needs a Python with vLLM, this project, and whatever rival is asked for. POOL_GIB: host memory given to each (default 62).
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
model=$1; shift
out=${OUT:-bench-out}; mkdir -p "$out"
gib=${POOL_GIB:-62}
python=${PYTHON:-python3}
server=0

bench() { # NAME CONNECTOR [arguments]
  local name=$1 connector=$2; shift 2
  timeout -k 5 "${LIMIT:-240}" "$python" "$here/engine_bench.py" --connector "$connector" --model "$model" --host-gib "$gib" \
    --json "$out/$name.json" "$@" ${ARGS:-} > "$out/$name.log" 2>&1 || echo "$name: exit $?"
  grep -a '^\[bench\]' "$out/$name.log" || tail -n 30 "$out/$name.log"
}
wait_port() { # PORT: until it accepts, the server dies, or two minutes have passed
  for _ in $(seq 240); do
    (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null && return 0
    kill -0 $server 2>/dev/null || return 1
    sleep 0.5
  done
  return 1
}
stop_server() {
  [ $server -ne 0 ] || return 0
  kill -TERM $server 2>/dev/null
  for _ in $(seq 40); do kill -0 $server 2>/dev/null || break; sleep 0.25; done
  kill -KILL $server 2>/dev/null
  wait $server 2>/dev/null
  server=0
}
trap stop_server EXIT

start_sidecar() { # arguments for `maru-sidecar run`; waits until it is ready
  export MARU_SOCKET=/tmp/maru-bench.sock
  "$python" -m maru_sidecar run --socket $MARU_SOCKET --pool-path "${POOL_PATH:-/dev/shm/maru-bench-pool}" \
    --pool-size "${gib}GiB" "$@" > "$out/sidecar.log" 2>&1 &
  server=$!
  for _ in $(seq 600); do
    "$python" -m maru_sidecar ping --socket $MARU_SOCKET >/dev/null 2>&1 && return 0
    kill -0 $server 2>/dev/null || { tail -n 20 "$out/sidecar.log"; return 1; }
    sleep 0.2
  done
  return 1
}

for name in "$@"; do
  echo "[$(date +%T)] $name"
  case $name in
    none | engine_only | offloading | simple) bench "$name" "$name" ;;
    maru*)
      case $name in
        maru) options='{}' ;;
        maru_overlap) options='{"maru.layerwise_overlap": true}' ;;
        maru_sync_store) options='{"maru.write_behind": false}' ;;
        *) echo "unknown: $name"; exit 2 ;;
      esac
      start_sidecar && bench "$name" maru --options "$options"
      "$python" -m maru_sidecar status --socket $MARU_SOCKET --format json > "$out/$name-status.json" 2>&1
      stop_server
      rm -f "${POOL_PATH:-/dev/shm/maru-bench-pool}"
      ;;
    lmcache_mp)
      ${LMCACHE_SERVER:-lmcache server} --host localhost --port 6555 --http-port 8091 --l1-size-gb "$gib" --no-l1-use-lazy \
        --shm-name "" --eviction-policy LRU --eviction-trigger-watermark 0.99 --eviction-ratio 0.05 > "$out/lmcache-server.log" 2>&1 &
      server=$!
      wait_port 6555 && bench "$name" lmcache_mp
      stop_server
      ;;
    pegaflow)
      ${PEGAFLOW_SERVER:-pegaflow-server} --addr 127.0.0.1:50055 --devices 0 --pool-size "${gib}gb" --http-addr 127.0.0.1:9091 \
        > "$out/pegaflow-server.log" 2>&1 &
      server=$!
      wait_port 50055 && bench "$name" pegaflow
      stop_server
      ;;
    *) echo "unknown: $name"; exit 2 ;;
  esac
done
