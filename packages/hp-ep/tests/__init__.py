"""Tests of hp_ep."""
