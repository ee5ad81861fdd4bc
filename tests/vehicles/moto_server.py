"""Serves S3 by moto, in an environment that has it: prints its address, until its input ends."""

from __future__ import annotations

import sys

from moto.server import ThreadedMotoServer  # type: ignore[import-not-found]

server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
host, port = server.get_host_and_port()
print(f"http://{host}:{port}", flush=True)
sys.stdin.read()
