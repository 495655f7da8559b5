"""The command line: one module a command, each a shell around library functions."""
