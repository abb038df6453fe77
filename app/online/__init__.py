"""One captioner for many clients: an engine thread, its queue, and the handles that answers come out of."""
