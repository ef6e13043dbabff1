"""Parts of ``tools/bench_whole.py``: cases, both sides of a case, instruments."""
