"""One captioner for many clients: an engine thread, its queue, and the tickets that answers come out of."""
