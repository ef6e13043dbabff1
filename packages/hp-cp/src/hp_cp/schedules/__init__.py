"""Carry out a plan: bring keys and values to a rank's queries, and their gradients home."""
