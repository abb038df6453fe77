"""The commands: the flags of each, and the job that their values make."""
