"""Front ends and composition: the command line, the HTTP API, the web page, jobs over many pictures."""
