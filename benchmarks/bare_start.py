"""The least that a script does before it can evaluate: import torch, load weights, join the group, leave.

LAUNCHER python bare_start.py WEIGHTS [torch | torch-over-mpi | horovod | mpi]
"""

import importlib
import socket
import sys

import torch
from safetensors.torch import load_file
from torch import distributed, nn

model = nn.Sequential()
model.features = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(32, 64, 3, padding=1),
    nn.BatchNorm2d(64),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(64, 64, 3, padding=1),
    nn.BatchNorm2d(64),
    nn.ReLU(),
)
model.classifier = nn.Sequential(
    nn.Flatten(), nn.Linear(64 * 7 * 7, 96), nn.ReLU(), nn.Dropout(0.3), nn.Linear(96, 10)
)
model.load_state_dict(load_file(sys.argv[1]))
model.eval()
with torch.inference_mode():
    model(torch.zeros(2, 1, 28, 28))
match sys.argv[2:]:
    case ["torch"]:
        distributed.init_process_group("gloo")
        distributed.destroy_process_group()
    case ["torch-over-mpi"]:
        from mpi4py import MPI

        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        address, port = MPI.COMM_WORLD.bcast(("127.0.0.1", port))
        distributed.init_process_group(
            "gloo",
            init_method=f"tcp://{address}:{port}",
            rank=MPI.COMM_WORLD.rank,
            world_size=MPI.COMM_WORLD.size,
        )
        distributed.destroy_process_group()
    case ["horovod"]:
        hvd = importlib.import_module("horovod.torch")

        hvd.init()
        hvd.shutdown()
    case ["mpi"]:
        from mpi4py import MPI

        MPI.COMM_WORLD.Barrier()  # importing it has joined
