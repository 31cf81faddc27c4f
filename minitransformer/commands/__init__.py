"""One file a command: its docstring is the help, `add_arguments` its options, `run` its work."""
