"""Tests of hp_cp."""
