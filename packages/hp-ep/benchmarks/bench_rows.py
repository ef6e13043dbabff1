"""The moves of rows by themselves: a permutation against a plain copy, a sum against scatter-add.

    python bench_rows.py [--quick] [--json FILE]

One process, one thread, interleaved in random order, medians of the ratio of neighbours. Copies go
into memory that was used before, as they do in a training loop. Also the largest error of the
layer in float32 against the same layer in float64, relative to the largest value.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from hp_ep import MoE, permute, scatter_rows

Arms = dict[str, Callable[[], Tensor]]


def main() -> int:
    """Print one line per number and write JSON if asked."""
    parser = argparse.ArgumentParser(description="row moves against copies")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it runs")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokens, dim, rounds = (64, 16, 3) if options.quick else (2048, 512, 31)
    rows = [
        _compare("permute / plain copy", _permutation(tokens * 8, dim), rounds),
        _compare("weighted combine / scatter-add", _sums(tokens, dim, 8), rounds),
        {"name": "float32 error of the layer", "value": _error(tokens, dim // 4), "target": 1e-5},
    ]
    for row in rows:
        print(f"{row['name']:32s} {row['value']:.3g}  (target {row['target']})")
    if options.json:
        options.json.write_text(json.dumps({"name": "ep_rows", "rows": rows}, indent=2))
    return 0


def _permutation(rows: int, dim: int) -> Arms:
    x, order = torch.randn(rows, dim), torch.randperm(rows)
    return {"ours": lambda: permute(x, order), "theirs": lambda: x.clone()}


def _sums(tokens: int, dim: int, top_k: int) -> Arms:
    """Weighted sums of each token's rows, and torch's sum into rows in a fixed order."""
    rows, order = torch.randn(tokens * top_k, dim), torch.randperm(tokens * top_k)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(tokens * top_k))
    places, weights = places.view(tokens, top_k), torch.rand(tokens, top_k)
    index = (order // top_k)[:, None].expand(-1, dim)

    def scatter_add() -> Tensor:
        scaled = rows * weights.view(-1)[order][:, None]
        return torch.zeros(tokens, dim).scatter_add_(0, index, scaled)

    return {"ours": lambda: scatter_rows(rows, order, places, weights), "theirs": scatter_add}


def _compare(name: str, arms: Arms, rounds: int) -> dict[str, object]:
    targets = {"permute / plain copy": 1.5, "weighted combine / scatter-add": 0.35}
    draw, ratios = random.Random(0), []
    for _ in range(rounds):
        seconds = {}
        for arm in draw.sample(sorted(arms), 2):
            started = time.process_time()
            for _ in range(5):
                result = arms[arm]()
            seconds[arm] = time.process_time() - started
            del result
        ratios.append(seconds["ours"] / seconds["theirs"])
    return {"name": name, "value": statistics.median(ratios[1:]), "target": targets[name]}


def _error(tokens: int, dim: int) -> float:
    torch.manual_seed(0)
    wide = MoE(dim, 2 * dim, 16, 4, dtype=torch.float64)
    narrow = MoE(dim, 2 * dim, 16, 4)
    narrow.load_state_dict(wide.state_dict())
    wide.load_state_dict(narrow.state_dict())
    x = torch.randn(tokens, dim)
    expected = wide(x.double()).detach()
    return float((narrow(x).detach() - expected).abs().max() / expected.abs().max())


if __name__ == "__main__":
    sys.exit(main())
