"""``dualeval setup-horovod``: build Horovod for the installed torch, or take it from a cache."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False, resolve_path=True)


@click.command("setup-horovod")
@click.option("--with-mpi/--without-mpi", default=None, help="Build with MPI.  [default: if mpicxx is found]")
@click.option(
    "--with-nccl/--without-nccl",
    default=None,
    help="Build with NCCL.  [default: if torch has CUDA and nvcc is found]",
)
@click.option(
    "--cache",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for built wheels.  [default: ~/.cache/dualeval/horovod]",
)
@click.option("--rebuild", is_flag=True, help="Build even if the cache has the wheel.")
@click.option("--constraint", type=_FILE, help="Constraints file for pip.")
@click.option("--dry-run", is_flag=True, help="Print the plan; build nothing.")
def setup_horovod(dry_run: bool, **wishes: Any) -> None:
    """Build Horovod for the installed torch and install it; a cache keeps the wheel."""
    from dualeval.tools.horovod import setup as horovod_setup

    do = horovod_setup.dry_run if dry_run else horovod_setup.set_up
    do(horovod_setup.Wishes(**wishes), os.environ, click.echo)
