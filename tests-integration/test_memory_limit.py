"""Loading and training need a rank's own part of the memory: a limit that one process exceeds."""

import sys
from pathlib import Path

import pytest
from limited_memory import LIMIT, MEBIBYTE, publish, run

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS counts on Linux only"),
]


def test_four_ranks_train_where_one_process_cannot(tmp_path: Path) -> None:
    parameters = publish(tmp_path)
    alone, errors = run(tmp_path, 1, LIMIT)
    assert alone == []
    assert "allocate" in errors or "MemoryError" in errors
    rows, errors = run(tmp_path, 4, LIMIT)
    assert [row["rank"] for row in rows] == [0, 1, 2, 3], errors
    shard, largest_file = 4 * parameters // 4 / MEBIBYTE, 20
    for row in rows:
        assert row["training"] <= LIMIT
        # The shards, their copy while the flat buffer takes them over, and one mapped file.
        assert row["loading"] - row["base"] <= 2 * shard + largest_file + 16
