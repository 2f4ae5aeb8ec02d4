"""From a command line and the launcher's environment to a run, or to a description of it."""
