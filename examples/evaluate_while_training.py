"""Evaluate while training, as a guest of torch's or Horovod's ranks. No bit of the training changes.

torchrun --nproc-per-node 2 examples/evaluate_while_training.py
horovodrun -np 2 python examples/evaluate_while_training.py horovod
"""

import sys

import torch

import dualeval

torch.manual_seed(0)  # the same model on every rank
y = (x := torch.randn(2000, 20))[:, :5].argmax(1)
net: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(20, 9), torch.nn.Dropout(), torch.nn.Linear(9, 5))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
if "horovod" in sys.argv:
    import horovod.torch as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters())
else:
    torch.distributed.init_process_group("gloo")
    net = torch.nn.parallel.DistributedDataParallel(net)
with dualeval.Session() as session:
    for epoch in range(3):
        for first in range(32 * session.world.rank, 1536, 32 * session.world.size):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(x[first : first + 32]), y[first : first + 32]).backward()
            optimizer.step()
        net.eval()
        for inputs, targets in session.batches(torch.utils.data.TensorDataset(x[1536:], y[1536:]), model=net):
            session.add(inputs, correct=net(inputs).argmax(1) == targets)
        net.train()
        print(f"rank {session.world.rank}, epoch {epoch}: {session.result().metrics}", flush=True)
