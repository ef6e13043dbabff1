"""Tests of hp_mesh."""
