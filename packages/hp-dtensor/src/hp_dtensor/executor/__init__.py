"""Carry plans out on this rank: eagerly, recorded by autograd, or as one op of a compiled graph."""
