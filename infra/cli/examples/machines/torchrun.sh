#!/usr/bin/env bash
# One trainer on several machines, by torchrun. On each of them, with the first one's name in MASTER:
#   MASTER=node-1 NODES=2 GPUS=8 bash torchrun.sh --config headrace.toml
# RUN names the group where several share a port. A rank that dies takes the others with it, and all start again.
set -euo pipefail
exec torchrun \
  --nnodes "$NODES" --nproc-per-node "$GPUS" \
  --rdzv-backend c10d --rdzv-endpoint "$MASTER:${PORT:-29500}" --rdzv-id "${RUN:-headrace}" \
  --max-restarts "${RESTARTS:-1000}" --shutdown-timeout "${STOP_S:-1800}" \
  --no-python headrace train "$@"
