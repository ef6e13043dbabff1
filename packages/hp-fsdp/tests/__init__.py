"""Tests of hp_fsdp."""
