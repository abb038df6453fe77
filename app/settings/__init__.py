"""Settings: one declaration each, and four sources: the command line, the environment, a file and the default."""
