"""How tokens reach their experts and come back: one dispatcher per module."""
