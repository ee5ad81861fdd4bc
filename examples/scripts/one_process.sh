#!/bin/sh
# Trains with one process; the options are those of examples/train_with_eval.py.
#
#   examples/scripts/one_process.sh --model resnet18 --data /data/imagenet --out runs/r18
exec python "$(dirname "$0")/../train_with_eval.py" "$@"
