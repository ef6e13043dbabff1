"""Hypothesis strategies for shapes of parameters and sizes of groups."""

from hypothesis import strategies as st

degrees = st.integers(1, 9)
shapes = st.lists(
    st.lists(st.integers(0, 13), min_size=1, max_size=3).map(tuple), min_size=1, max_size=8
)
itemsizes = st.sampled_from([1, 2, 4, 8])
thresholds = st.sampled_from([0, 64, 512, 1 << 30])
