"""How tensors lie over meshes, without torch; `_convert` alone leads from and to its placements."""
