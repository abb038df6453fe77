"""Terminal output: data on stdout, messages on stderr."""
