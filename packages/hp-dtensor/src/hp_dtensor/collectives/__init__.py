"""The one door to the process groups: every collective of every package goes through here."""
