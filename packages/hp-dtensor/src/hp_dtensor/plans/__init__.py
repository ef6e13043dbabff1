"""What is to be moved, in which steps and at which price, and the cheapest way; no torch."""
