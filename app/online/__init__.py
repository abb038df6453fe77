"""One captioner for many clients: the engine thread, its queue, and the clients' handles."""
