"""Tests of hp_dtensor."""
