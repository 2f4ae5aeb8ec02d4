"""What all commands share: options of the tools, errors in one line, signals, exit codes."""
