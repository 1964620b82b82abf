"""The command line: one file a command, each with `run(argv) -> exit code`."""
