"""The command line: flags and settings in, a command's exit code out.

main.py builds the parser of all commands and runs one of them. flags.py declares the flags of flags.json. `commands`
turns their values into a job of a room below. `doctor` examines the installation and a model, `measuring` is `bench`.
Nothing imports this room. Read main.py first, then commands/answering.py.
"""
