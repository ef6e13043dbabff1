"""Even work for all ranks: where experts live, how they move, what a load looks like."""
