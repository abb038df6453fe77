"""Pictures and prompts in, answers out: the captioner and all that one answer needs."""
