"""Tasks: what is trained, on what loss, and how it is scored.  One folder per kind of task."""
