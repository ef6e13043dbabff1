"""The host time of plans: what one rank spends before a layer on a new mask, and on a known one.

Packed data brings another mask with every batch, whose first layer pays the cold time and the
others the warm one. Every draw has a mask of its own, so that nothing has to be cleared. The time
is that of the process, for the plan and for one rank's part of it: its blocks, and the rows that
come and go.
"""

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hp_cp import Auto, Greedy, Layout, MaskSpec, PerDocument, Zigzag, plan_attention
from hp_cp._plan import part_of

Case = tuple[str, Layout, int, int, int, int | None]
CASES: tuple[Case, ...] = (
    ("PerDocument, 300 documents", PerDocument(), 64, 1 << 19, 300, None),
    ("PerDocument, 20 documents", PerDocument(), 64, 1 << 19, 20, None),
    ("PerDocument, 300, window 4096", PerDocument(), 64, 1 << 19, 300, 4096),
    ("Greedy(8), 600 documents", Greedy(8), 256, 1 << 20, 600, None),
    ("Greedy(8), one document", Greedy(8), 256, 1 << 20, 1, None),
    ("Auto, 600 documents", Auto(), 128, 1 << 20, 600, None),
    ("Auto, 1024 documents", Auto(), 128, 1 << 20, 1024, None),
    ("Zigzag, one document", Zigzag(), 512, 1 << 20, 1, None),
)
WARM_CALLS = 200


def drawn(seq_len: int, documents: int, window: int | None, draws: int) -> Iterator[MaskSpec]:
    """Yield causal masks of documents that are cut anywhere; of one, each one longer."""
    rng = random.Random(0)
    for i in range(draws):
        ends = sorted(rng.sample(range(1, seq_len), documents - 1))
        yield MaskSpec(causal=True, window=window, cu_seqlens=(0, *ends, seq_len + i))


def measure(case: Case, draws: int) -> dict[str, Any]:
    """Return the median times of one case, and the size of what was planned."""
    name, layout, n, seq_len, documents, window = case
    cold, warm = [], []
    for mask in drawn(seq_len, documents, window, draws):
        length = mask.cu_seqlens[-1] if mask.cu_seqlens else seq_len

        def planned(mask: MaskSpec = mask, length: int = length) -> int:
            plan = plan_attention(mask, layout, n, length, q_heads=8)
            return sum(map(len, part_of(plan, n // 2).blocks.values()))

        gc.collect()
        start = time.process_time()
        blocks = planned()
        cold.append(time.process_time() - start)
        start = time.process_time()
        for _ in range(WARM_CALLS):
            planned()
        warm.append((time.process_time() - start) / WARM_CALLS)
    return {
        "case": name,
        "ranks": n,
        "seq_len": seq_len,
        "cold_ms": 1000 * statistics.median(cold),
        "warm_ms": 1000 * statistics.median(warm),
        "blocks": blocks,
    }


def main() -> None:
    """Print the table, and write JSON where it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one draw")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--draws", type=int, default=5)
    args = parser.parse_args()
    draws = 1 if args.quick else args.draws
    rows = []
    print(f"median of {draws} masks, of one rank's part")
    for case in CASES:
        row = measure(case, draws)
        rows.append(row)
        print(
            f"  {row['case']:30s} {row['ranks']:3d} ranks   cold {row['cold_ms']:7.1f} ms   "
            f"warm {row['warm_ms']:5.3f} ms   {row['blocks']} blocks"
        )
    if args.json:
        answer = {"name": "plans", "settings": {"draws": draws}, "rows": rows}
        args.json.write_text(json.dumps(answer, indent=1))


if __name__ == "__main__":
    main()
