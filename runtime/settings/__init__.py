"""Settings: each has one declaration and four sources (command line, environment, file and default)."""
