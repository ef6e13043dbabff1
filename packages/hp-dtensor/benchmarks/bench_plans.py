"""Time the planning of transfers and of whole plans at many ranks, on one mesh and between two.

Nothing communicates: one rank of up to 131,072 computes with integers. ``transfer`` is
`plan_transfer`, which is not memoized. ``plan`` is `explain`: first with empty caches ("cold"),
then with the memoized plan ("kept"). The last row is a cold plan over five axes, which needs the
longest search. Times are medians over all rounds.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from placed import five_axes_row

from hp_dtensor import (
    Layout,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    explain,
    plan_transfer,
)
from hp_dtensor.testing import clear_caches

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
Case = tuple[str, Layout, Layout]


def cases(world: int) -> Iterator[Case]:
    """Yield redistributions in which each rank has few peers."""
    outer = world // 256
    cube, flat = (outer, 16, 16), (world // 16, 16)
    half = range(world // 2)
    shuffled = list(range(world))
    random.Random(0).shuffle(shuffled)
    yield "gather one axis", Layout(flat, (S0, S1)), Layout(flat, (S0, R))
    yield "swap two axes", Layout(cube, (R, S0, S1)), Layout(cube, (R, S1, S0))
    yield "two axes, 32 peers", Layout(cube, (S0, R, S1)), Layout(cube, (R, S0, S1))
    yield "reduce and swap", Layout(cube, (P, S0, S1)), Layout(cube, (R, S1, S0))
    four = (world // 512, 8, 8, 8)
    yield "four axes", Layout(four, (P, S0, S1, R)), Layout(four, (R, S1, S0, S0))
    yield (
        "other shape",
        Layout(flat, (S0, S1)),
        Layout((world // 8, 8), (S0, S1), ranks=range(world - 1, -1, -1)),
    )
    yield (
        "half to half",
        Layout((world // 32, 16), (S0, S1), ranks=half),
        Layout((world // 16, 8), (S0, S1), ranks=range(world // 2, world)),
    )
    yield (
        "shuffled ranks",
        Layout(flat, (R, S0)),
        Layout((world // 32, 32), (S0, S0), ranks=shuffled),
    )
    sizes = tuple(3 + 2 * (i % 2) for i in range(world))
    yield "ragged to even", Layout((world,), (RaggedShard((0,), sizes),)), Layout((world,), (S0,))


def timed(call: Callable[[], Any], rounds: int, before: Callable[[], None] = lambda: None) -> float:
    """Return the median time of a call in microseconds."""
    times = []
    for _ in range(rounds):
        before()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def row_of(world: int, case: Case, rounds: int) -> dict[str, Any]:
    """Time the plan of one redistribution on one rank."""
    name, source, target = case
    shape = (world * 4, world)
    rank = world // 3 + 1
    row: dict[str, Any] = {"part": "plans", "case": name, "ranks": world}
    if not source.has_partial:
        transfer = plan_transfer(source, target, shape, rank)
        row["peers"] = len({peer for peer, _ in (*transfer.sends, *transfer.recvs)})
        row["transfer_us"] = timed(lambda: plan_transfer(source, target, shape, rank), rounds)

    def plan() -> Any:
        return explain(source, target, shape=shape, rank=rank)

    row["plan_us"] = timed(plan, rounds, clear_caches)
    row["kept_us"] = timed(plan, rounds)
    return row


def main() -> None:
    """Print the rows of all worlds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    rows, rounds = [], 5 if options.quick else 50
    for world in (4096, 16384, 131072):
        for case in cases(world):
            row = row_of(world, case, rounds)
            rows.append(row)
            print(
                f"{world:7d} ranks  {row['case']:20s} peers {row.get('peers', '-'):>3}  transfer "
                f"{row.get('transfer_us', float('nan')):8.1f} us  plan {row['plan_us']:9.1f} us  "
                f"kept {row['kept_us']:6.1f} us",
                flush=True,
            )
    rows.append(five_axes_row(rounds))
    print(f"     32 ranks  {rows[-1]['case']:21s} plan {rows[-1]['plan_us']:9.1f} us")
    if options.json:
        options.json.write_text(json.dumps({"name": "plans", "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
