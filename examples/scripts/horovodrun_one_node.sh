#!/bin/sh
# Trains with RANKS processes (2) on this machine, started by horovodrun: one for each GPU.
#
#   RANKS=8 examples/scripts/horovodrun_one_node.sh --model resnet18 --data /data/imagenet --out runs/r18
exec horovodrun -np "${RANKS:-2}" python "$(dirname "$0")/../train_with_eval.py" "$@"
