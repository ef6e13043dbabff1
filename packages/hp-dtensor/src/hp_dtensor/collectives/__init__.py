"""The interface to process groups: every collective of every package goes through it."""
