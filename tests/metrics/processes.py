"""Functions in real gloo processes."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing


def _start(rank: int, world: int, port: int, folder: str, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    try:
        torch.save(work(rank, world, *arguments), Path(folder) / f"{rank}.pt")
    finally:
        torch.distributed.destroy_process_group()


def in_processes(world: int, folder: Path, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `work(rank, world, *arguments)` returns in each of `world` processes that are one gloo group."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    settings = (world, port, str(folder), work, arguments)
    # spawned processes would import for seconds
    multiprocessing.start_processes(_start, settings, nprocs=world, start_method="fork")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]
