"""Ways to cut a sequence over ranks: pure functions of integers."""
