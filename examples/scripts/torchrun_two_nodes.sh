#!/bin/sh
# Trains with RANKS processes (2) on each of two machines. Type it on both, with the name of the first as HEAD.
#
#   HEAD=node1 RANKS=8 examples/scripts/torchrun_two_nodes.sh --model resnet18 --data /data/imagenet --out runs/r18
#
# Port 29500 of HEAD has to be free (PORT=... takes another one), and OUT is written there.
: "${HEAD:?give the name of the first machine, as HEAD=node1}"
exec torchrun --nnodes 2 --nproc-per-node "${RANKS:-2}" --rdzv-id training --rdzv-backend c10d \
  --rdzv-endpoint "$HEAD:${PORT:-29500}" "$(dirname "$0")/../train_with_eval.py" "$@"
