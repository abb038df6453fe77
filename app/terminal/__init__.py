"""What a terminal gets: data on stdout, messages on stderr."""
