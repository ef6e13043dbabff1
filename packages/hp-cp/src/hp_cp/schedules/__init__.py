"""Ways to bring keys and values to the queries of a plan."""
