"""The peak memory of a process of its own, for scripts that tests start."""

# Not getrusage: its peak is handed down from the process that forked, which may have been far larger.
PEAK_MB = """
def peak_mb():
    with open("/proc/self/status") as status:
        return int(status.read().partition("VmHWM:")[2].split()[0]) / 1024

"""
