"""A store for one attempt of a run that torchrun restarts."""

import time
import uuid
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store

POLL_SECONDS = 0.02


def store_of_attempt(store: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Return a view of ``store`` without the keys of attempts that have ended.

    The workers of all attempts share the store of torchrun's agent. Ranks that start early would
    find the addresses that killed ranks left there. Each agent counts only its own restarts, so the
    ranks cannot choose a prefix by that number: rank 0 chooses it, and passes it to each rank under
    a key that this process of the rank has made.

    Args:
        store: The store that all ranks of all attempts share.
        rank: The rank of this process.
        world_size: The number of ranks.
        timeout: How long to wait for the other ranks.

    Raises:
        RuntimeError: A rank did not join before the timeout.
    """
    if rank:
        own = uuid.uuid4().hex
        store.set(f"attempt/rank/{rank}", own)
        store.wait([f"attempt/prefix/{own}"], timeout)
        prefix = store.get(f"attempt/prefix/{own}").decode()
        store.set(f"attempt/{prefix}/{rank}", "")
        return PrefixStore(prefix, store)
    prefix = uuid.uuid4().hex
    missing = set(range(1, world_size))
    deadline = time.monotonic() + timeout.total_seconds()
    while missing:
        for other in sorted(missing):
            if store.check([f"attempt/{prefix}/{other}"]):
                missing.remove(other)
            elif store.check([f"attempt/rank/{other}"]):
                # This may be the key of a killed process: look again until the rank has answered.
                key = store.get(f"attempt/rank/{other}").decode()
                store.set(f"attempt/prefix/{key}", prefix)
        if missing and time.monotonic() > deadline:
            absent = ", ".join(map(str, sorted(missing)))
            raise RuntimeError(f"rank 0 waited {timeout} for ranks {absent}, which did not join")
        time.sleep(POLL_SECONDS)
    return PrefixStore(prefix, store)
