"""One captioner for many clients: the engine thread, its queue, and the handles of requests."""
