"""Tests of the reference trainer."""
