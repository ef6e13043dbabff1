"""Pure plans: who computes which block, in which order keys travel, and what that costs."""
