"""The command line: a file or folder a command, each with `run(argv) -> exit code`."""
