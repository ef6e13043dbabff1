"""What one rank process does: initialise gloo, then run what it is sent until told to stop."""

import gc
import os
import pickle
import signal
import traceback
from multiprocessing.connection import Connection

import cloudpickle
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from . import nccl
from ._gloo import avoid_coalesced_gathers, share_one_device

LOOPBACK = "127.0.0.1"


def serve(rank: int, world_size: int, port: int, pipe: Connection, like_nccl: bool = False) -> None:
    """Be ``rank`` of ``world_size``; receive pickled ``(function, args)`` and send back results."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()  # what the server has imported is not garbage, and takes long to go through
    torch.set_num_threads(1)
    if os.uname().sysname == "Linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    avoid_coalesced_gathers()
    share_one_device()
    store = TCPStore(LOOPBACK, port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    if like_nccl:
        nccl.install()
    while (message := pipe.recv_bytes()) != b"":
        try:
            function, args = map(pickle.loads, pickle.loads(message))
            reply = (True, function(rank, *args))
            payload = cloudpickle.dumps(reply)
        except BaseException:  # noqa: BLE001 - whatever a rank raises is the parent's to report
            payload = cloudpickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(payload)
    # Meshes and autograd graphs may still hold groups: leave without running destructors.
    os._exit(0)
