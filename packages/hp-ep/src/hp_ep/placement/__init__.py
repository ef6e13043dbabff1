"""Where experts live, how they move between ranks, and how they are saved."""
