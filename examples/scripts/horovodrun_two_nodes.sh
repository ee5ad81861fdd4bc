#!/bin/sh
# Trains with RANKS processes (2) on each of two machines, which horovodrun reaches over ssh.
#
#   HOSTS=node1,node2 RANKS=8 examples/scripts/horovodrun_two_nodes.sh --model resnet18 --data DATA --out runs/r18
#
# Type it on the first machine, where OUT is written; this folder and DATA have to be on both.
: "${HOSTS:?give the names of two machines, as HOSTS=node1,node2}"
ranks=${RANKS:-2}
exec horovodrun -np $((2 * ranks)) -H "${HOSTS%,*}:$ranks,${HOSTS#*,}:$ranks" \
  python "$(dirname "$0")/../train_with_eval.py" "$@"
