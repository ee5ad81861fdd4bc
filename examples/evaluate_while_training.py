"""Evaluate while training, as a guest of torch's or Horovod's ranks: the training keeps every bit.

torchrun --nproc-per-node 2 examples/evaluate_while_training.py
horovodrun -np 2 python examples/evaluate_while_training.py horovod
"""

import sys

import torch

import dualeval

x, y = torch.arange(40000.0).sin().view(2000, 20), torch.arange(2000) % 5
net = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Dropout(), torch.nn.Linear(64, 5))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
if "horovod" in sys.argv:
    import horovod.torch as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters())
    model: torch.nn.Module = net
else:
    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(net)
with dualeval.Session() as session:
    for epoch in range(3):
        for first in range(32 * session.world.rank, 1600, 32 * session.world.size):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[first : first + 32]), y[first : first + 32]).backward()
            optimizer.step()
        net.eval()
        for inputs, targets in session.batches(torch.utils.data.TensorDataset(x[1600:], y[1600:])):
            session.add(inputs, correct=net(inputs).argmax(1) == targets)
        net.train()
        print(f"epoch {epoch}: {session.result().metrics['correct']:.2%}", flush=True)
