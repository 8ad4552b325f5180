"""The command line that confines a program: bubblewrap's arguments, and the wrappers that run inside before it.

    bwrap (namespaces, mounts, filter) ─> prlimit (limits) ─> sh, first of its namespace ─> setpriv (user) ─> program

With the shell's end, which is the program's, the kernel ends all that is left in the namespace; were bubblewrap's own
reaper the first there, bubblewrap would leave it behind as a zombie for the reaper of orphans. The shell keeps the
user of bubblewrap, because only then the death of bubblewrap ends it.

As root each run has a user id of its own, so that its limit of processes is its own, and no user namespace is needed; as
any other user bubblewrap makes one, in which the program has the user id 65534. Either way it ends up without capabilities,
unable to gain any (no_new_privs), and sees no network, no /proc, no host file but the runtime below and its given files,
read-only. In a user namespace the limit of processes does not hold: a program may raise it for itself and for the first
process. Memory, CPU time and wall time end such a run.
"""

import os
import secrets
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated

import msgspec

PROGRAM = "/program"  # where the files of a run lie, read-only; its current folder is /tmp
RUNTIME = (
    "/usr/bin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec", "/usr/local/bin", "/usr/local/lib",
    "/bin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache",
)  # fmt: skip
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp"}
UNPRIVILEGED_USER = 65534  # the user that owns no files, by convention
FIRST_USER = 0x4000_0000
MEBIBYTE = 1024 * 1024

Whole = Annotated[int, msgspec.Meta(ge=1, description="a whole number of 1 or more")]
Above = Annotated[float, msgspec.Meta(gt=0, description="seconds above 0")]


class SandboxLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one run. wall_s: of the run, start included. cpu_s, memory_bytes (address space), open_files: of
    each of its processes; total_bytes: of memory, of all of them together and of their files' names in the kernel, measured
    every 20 ms. processes: threads count too. file_bytes: of one file. tmp_bytes: of /tmp, and of /dev/shm.
    output_bytes: of standard output, and of standard error.
    """

    wall_s: Above = 10.0
    cpu_s: Whole = 5
    memory_bytes: Whole = 512 * MEBIBYTE
    processes: Whole = 16
    open_files: Whole = 64
    file_bytes: Whole = 16 * MEBIBYTE
    tmp_bytes: Whole = 16 * MEBIBYTE
    output_bytes: Whole = MEBIBYTE
    total_bytes: Whole = 1024 * MEBIBYTE


def is_machine_root() -> bool:
    """True if this process is root and may become any user (in a user namespace it may not)."""
    if os.geteuid() != 0:
        return False
    return Path("/proc/self/uid_map").read_text(encoding="ascii").split() == ["0", "0", "4294967295"]


def python_executable() -> str:
    """The interpreter that runs this process, outside of any virtual environment."""
    return os.path.realpath(sys.executable)


def confined(
    program: Sequence[str],
    *,
    bwrap: str,
    limits: SandboxLimits,
    as_root: bool,
    files: Mapping[str, int],
    readable: Sequence[str],
    seccomp: int,
    status: int,
) -> list[str]:
    """The whole command. files: name below PROGRAM to a descriptor with its content. seccomp, status: descriptors."""
    user = FIRST_USER + secrets.randbelow(1 << 29) if as_root else UNPRIVILEGED_USER
    command = [bwrap, *_namespaces(as_root), *_mounts(limits, files, readable)]
    command += ["--clearenv", *(word for pair in ENVIRONMENT.items() for word in ("--setenv", *pair))]
    command += ["--chdir", "/tmp", "--seccomp", str(seccomp), "--json-status-fd", str(status), "--"]
    maxima = {
        "cpu": limits.cpu_s, "as": limits.memory_bytes, "nproc": limits.processes, "nofile": limits.open_files,
        "fsize": limits.file_bytes, "core": 0, "memlock": 0,
    }  # fmt: skip
    command += ["/usr/bin/prlimit", *(f"--{name}={value}:{value}" for name, value in maxima.items())]
    command += ["/bin/sh", "-c", '"$@"; exit $?', "sh"]
    if as_root:
        command += ["/usr/bin/setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        command += ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all", "--"]
    return [*command, *program]


def _namespaces(as_root: bool) -> list[str]:
    shared = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    shared += ["--hostname", "sandbox", "--die-with-parent", "--new-session", "--as-pid-1"]
    if as_root:  # setpriv needs these to change the user and to empty the bounding set, and gives them up
        kept = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP")
        return [*shared, "--cap-drop", "ALL", *(word for right in kept for word in ("--cap-add", right))]
    user = str(UNPRIVILEGED_USER)
    return [*shared, "--unshare-user", "--uid", user, "--gid", user, "--cap-drop", "ALL"]


def _mounts(limits: SandboxLimits, files: Mapping[str, int], readable: Sequence[str]) -> list[str]:
    python = [] if sys.base_prefix == "/usr" else [python_executable(), f"{sys.base_prefix}/lib"]
    paths = [*RUNTIME, *python, *readable]
    made: set[str] = {"/dev", "/dev/shm", "/tmp"}
    bound: list[str] = []
    size = str(limits.tmp_bytes)
    mounts = ["--dev", "/dev", "--size", size, "--perms", "1777", "--tmpfs", "/dev/shm"]
    mounts += ["--size", size, "--perms", "1777", "--tmpfs", "/tmp"]  # first: readable paths may lie below it
    for path in dict.fromkeys(paths):
        if not os.path.lexists(path) or any(path.startswith(f"{folder}/") for folder in bound):
            continue
        mounts += _folders(PurePosixPath(path).parent, made)
        if os.path.islink(path):
            mounts += ["--symlink", os.readlink(path), path]
        else:
            mounts += ["--ro-bind", path, path]
            bound.append(path)
    packages = sysconfig.get_paths(vars={"base": sys.base_prefix, "platbase": sys.base_prefix})["purelib"]
    if os.path.isdir(packages) and not any(path.startswith(packages) for path in readable):
        mounts += ["--tmpfs", packages, "--remount-ro", packages]
    mounts += ["--perms", "0755", "--dir", PROGRAM]
    for name, descriptor in files.items():
        mounts += ["--perms", "0444", "--file", str(descriptor), f"{PROGRAM}/{name}"]
    return [*mounts, "--remount-ro", "/dev", "--remount-ro", "/"]


def _folders(folder: PurePosixPath, made: set[str]) -> list[str]:
    """Mount points' parents, readable: bubblewrap itself would make them for their owner only."""
    words: list[str] = []
    for path in [*reversed(folder.parents), folder]:
        name = str(path)
        if name != "/" and name not in made:
            words += ["--perms", "0755", "--dir", name]
            made.add(name)
    return words
