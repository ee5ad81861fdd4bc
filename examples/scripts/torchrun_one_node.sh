#!/bin/sh
# Trains with RANKS processes (2) on this machine, started by torchrun: one for each GPU.
#
#   RANKS=8 examples/scripts/torchrun_one_node.sh --model resnet18 --data /data/imagenet --out runs/r18
exec torchrun --standalone --nproc-per-node "${RANKS:-2}" "$(dirname "$0")/../train_with_eval.py" "$@"
