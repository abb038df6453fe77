"""One captioner for many clients: an engine thread, its queue, and handles for the answers."""
