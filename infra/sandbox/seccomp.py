"""The system-call filter of the sandbox: a classic BPF program for Linux on x86-64, as `seccomp(2)` takes it.

Guarantees: a call of another architecture kills the process (also the x32 one, whose numbers would slip past a list);
calls in DENIED fail with EPERM; a clone that asks for a namespace fails with EPERM; clone3, whose flags a filter cannot
see, and calls of kernels newer than this list fail with ENOSYS, which makes the C library fall back to older calls.

Limit: record locks (fcntl F_SETLK) stay, since SQLite takes them; of a file of the host that is readable inside, a program
can hold one for reading until its end.
"""

import errno
import struct

ARCHITECTURE = 0xC000003E  # AUDIT_ARCH_X86_64
LAST_KNOWN = 462  # mseal: later calls are not there
X32_BIT = 0x4000_0000
CLONE = 56
CLONE3 = 435
IOCTL = 16
# CLONE_NEWTIME, _NEWNS, _NEWCGROUP, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET
NAMESPACES = 0x80 | 0x0002_0000 | 0x0200_0000 | 0x0400_0000 | 0x0800_0000 | 0x1000_0000 | 0x2000_0000 | 0x4000_0000
TERMINAL_INJECTION = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX
FCNTL = 72
# F_SETLEASE and F_NOTIFY hold up other processes that open a host file; F_SETPIPE_SZ enlarges pipes, which no limit counts.
HOLDS = (1024, 1026, 1031)

# Names and numbers (x86-64) of calls that nothing in a sandbox needs, and that attacks on kernels and neighbours begin with.
DENIED = {
    # other processes
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "process_madvise": 440, "kcmp": 312,
    "pidfd_open": 434, "pidfd_getfd": 438, "pidfd_send_signal": 424, "process_mrelease": 448,
    # namespaces and mounts
    "unshare": 272, "setns": 308, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "move_mount": 429,
    "open_tree": 428, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442,
    "statmount": 457, "listmount": 458,
    # the network, and sockets with names (socketpair, which has none, stays)
    "socket": 41, "connect": 42, "accept": 43, "bind": 49, "listen": 50, "accept4": 288,
    # interfaces whose calls a filter cannot see, or with a history of holes
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "io_setup": 206, "io_submit": 209,
    "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "keyctl": 250, "add_key": 248, "request_key": 249,
    "fanotify_init": 300, "fanotify_mark": 301, "open_by_handle_at": 304, "name_to_handle_at": 303,
    # memory that no limit counts
    "memfd_create": 319, "memfd_secret": 447, "shmget": 29, "shmat": 30, "msgget": 68, "semget": 64, "mq_open": 240,
    "mbind": 237, "set_mempolicy": 238, "migrate_pages": 256, "move_pages": 279, "mlock": 149, "mlock2": 325,
    "mlockall": 151, "remap_file_pages": 216, "vmsplice": 278, "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190,
    "setsockopt": 54,  # larger buffers
    # calls that reach read-only files of the host
    "flock": 73, "inotify_init": 253, "inotify_init1": 294, "inotify_add_watch": 254, "cachestat": 451,
    # the machine
    "kexec_load": 246, "kexec_file_load": 320, "init_module": 175, "finit_module": 313, "delete_module": 176,
    "reboot": 169, "swapon": 167, "swapoff": 168, "acct": 163, "quotactl": 179, "quotactl_fd": 443, "syslog": 103,
    "sethostname": 170, "setdomainname": 171, "iopl": 172, "ioperm": 173, "modify_ldt": 154, "personality": 135,
    "settimeofday": 164, "clock_settime": 227, "clock_adjtime": 305, "adjtimex": 159, "vhangup": 153,
    "mknod": 133, "mknodat": 259, "uselib": 134, "ustat": 136, "sysfs": 139, "lookup_dcookie": 212,
    "nfsservctl": 180, "create_module": 174, "get_kernel_syms": 177, "query_module": 178,
}  # fmt: skip

# Offsets in struct seccomp_data, and the opcodes used.
_NR, _ARCH, _ARGUMENT_0, _ARGUMENT_1 = 0, 4, 16, 24
_LOAD, _EQUAL, _ABOVE, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF_0000, 0x8000_0000, 0x0005_0000

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


def seccomp_filter() -> bytes:
    """The program: an array of struct sock_filter, ready for `bwrap --seccomp`."""
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, ARCHITECTURE),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NR),
        (_ANY_BIT, 0, 1, X32_BIT),
        (_RETURN, 0, 0, _KILL),
    ]
    program += _when((_ABOVE, 0, 0, LAST_KNOWN), errno.ENOSYS)
    program += _when((_EQUAL, 0, 0, CLONE3), errno.ENOSYS)
    for number in sorted(DENIED.values()):
        program += _when((_EQUAL, 0, 0, number), errno.EPERM)
    program += _argument(CLONE, _ARGUMENT_0, [(_ANY_BIT, 0, 0, NAMESPACES)])
    program += _argument(IOCTL, _ARGUMENT_1, [(_EQUAL, 0, 0, request) for request in TERMINAL_INJECTION])
    program += _argument(FCNTL, _ARGUMENT_1, [(_EQUAL, 0, 0, command) for command in HOLDS])
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _when(test: Instruction, error: int) -> list[Instruction]:
    """If `test` holds for the loaded value, fail with `error`; else go on."""
    code, _, _, operand = test
    return [(code, 0, 1, operand), (_RETURN, 0, 0, _ERROR | error)]


def _argument(call: int, offset: int, tests: list[Instruction]) -> list[Instruction]:
    """If the call is `call` and a test holds of the lower half of an argument, fail with EPERM; else go on."""
    body: list[Instruction] = [(_LOAD, 0, 0, offset)]
    for test in tests:
        body += _when(test, errno.EPERM)
    body.append((_LOAD, 0, 0, _NR))
    return [(_EQUAL, 0, len(body), call), *body]
