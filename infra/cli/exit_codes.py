"""What a command's exit code says, besides 0 (done), 1 (failed) and 130 (stopped with Ctrl-C)."""

CONFIG_ERROR = 2  # a mistake in settings or on the command line: a restart cannot mend it
FENCED_OUT = 3  # another process of this role has taken over: a restart would take the role back from it
INTERRUPTED = 130  # by SIGINT, or before there was anything to end in order
