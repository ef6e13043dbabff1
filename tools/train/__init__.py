"""The reference trainer: a small language model trained over any mix of parallel axes."""
