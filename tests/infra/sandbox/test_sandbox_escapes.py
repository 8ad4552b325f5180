"""Every way out of the sandbox that is known here, tried from the inside by both ways in (real users, a user namespace).

Each attempt prints ESCAPED where it worked; those that are harmless are also run unconfined, where they must work: an
attempt that cannot succeed anywhere would prove nothing.
"""

import subprocess
import sys

import pytest

from infra.sandbox.command import is_machine_root
from infra.sandbox.sandbox import Sandbox
from infra.sandbox.seccomp import DENIED, seccomp_filter
from tests.infra.sandbox.confining import sandbox_or_skip

PACKAGES = next(path for path in sys.path if "site-packages" in path)
CALL = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    result = libc.syscall(number, *[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    return result
def escaped(worked):
    print("ESCAPED" if worked else "held")
"""


def reading(path: str) -> str:
    return f"open({path!r}, 'rb').read(1); escaped(True)"


def writing(path: str) -> str:
    return f"open({path!r}, 'wb').write(b'x'); escaped(True)"


CLONE = "r = call(56, {flags} | 17, 0, 0, 0, 0)\nif r == 0: os._exit(0)\nescaped(r > 0)"

# Name, what is tried, and whether it works unconfined on any machine.
ATTEMPTS = [
    ("an internet socket", "import socket; socket.socket(); escaped(True)", True),
    ("a raw connect", "escaped(call(42, 0, 0, 0) == -1 and ctypes.get_errno() != 1)", True),
    ("an abstract socket", "import socket as s; s.socket(s.AF_UNIX).bind('\\0headrace-test'); escaped(True)", True),
    ("a netlink socket", "import socket as s; s.socket(s.AF_NETLINK, s.SOCK_RAW, 0); escaped(True)", True),
    ("any network device", "escaped([n for _, n in __import__('socket').if_nameindex() if n != 'lo'])", False),
    ("name resolution", "import socket; socket.getaddrinfo('localhost', 80); escaped(os.path.exists('/etc/hosts'))", False),
    ("host users", reading("/etc/passwd"), True),
    ("host passwords", reading("/etc/shadow"), False),
    ("the code of headrace", reading(__file__), True),
    ("installed packages", f"sys.path.append({PACKAGES!r}); import numpy; escaped(True)", True),
    ("/proc", "escaped(os.listdir('/proc'))", True),
    ("the parent's environment", "open(f'/proc/{os.getppid()}/environ', 'rb').read(); escaped(True)", True),
    ("/sys", "escaped(os.listdir('/sys'))", True),
    ("an environment variable of the host", "escaped(set(os.environ) - {'PATH', 'HOME', 'TMPDIR', 'PWD', 'LC_CTYPE'})", True),
    ("other processes", "escaped([p for p in range(3, 4000) if p != os.getpid() and not libc.kill(p, 0)])", True),
    ("killing all", "call(62, -1, 9) if os.getpid() < 9 else 0; escaped(os.getppid() not in (0, 1))", False),
    ("killing the first process", "libc.kill(1, 9); import time; time.sleep(.2); escaped(False)", False),
    ("inherited descriptors", "escaped([d for d in range(3, 64) if not _closed(d)])", False),
    ("ptrace", "escaped(call(101, 0, 0, 0, 0) == 0)", True),
    ("reading another process's memory", "escaped(call(310, os.getpid(), 0, 0, 0, 0, 0) == 0)", True),
    ("a user namespace", "escaped(call(272, 0x10000000) == 0)", False),
    ("a mount namespace", "escaped(call(272, 0x20000) == 0)", False),
    ("clone into a user namespace", CLONE.format(flags="0x10000000"), False),
    ("clone into a network namespace", CLONE.format(flags="0x40000000"), False),
    ("clone3", "escaped(call(435, 0, 0) == -1 and ctypes.get_errno() != 38)", True),
    ("setns", "escaped(call(308, 0, 0) == -1 and ctypes.get_errno() != 1)", True),
    ("io_uring", "p = ctypes.create_string_buffer(256); escaped(call(425, 4, p) >= 0)", False),
    ("memory without a limit", "escaped(os.memfd_create('x') >= 0)", True),
    ("System V shared memory", "escaped(call(29, 0, 4096, 0o1600) >= 0)", True),
    ("a keyring", "escaped(call(250, 0, -1, 0) >= 0)", False),
    ("BPF", "escaped(call(321, 0, 0, 0) == -1 and ctypes.get_errno() != 1)", False),
    ("performance events", "escaped(call(298, 0, 0, 0, 0, 0) == -1 and ctypes.get_errno() != 1)", False),
    ("userfaultfd", "escaped(call(323, 0) >= 0)", False),
    ("a mount", "escaped(libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0)", False),
    ("remounting the root", "escaped(libc.mount(b'none', b'/', None, 0x20 | 0x1000, None) == 0)", False),
    ("unmounting", "escaped(libc.umount2(b'/program', 2) == 0)", False),
    ("pivot_root", "escaped(call(155, 0, 0) == -1 and ctypes.get_errno() != 1)", False),
    ("chroot", "os.chroot('/tmp'); escaped(True)", False),
    ("a device node", "os.mknod('/tmp/sda', 0o60600, os.makedev(8, 0)); escaped(True)", False),
    ("the machine's memory", reading("/dev/mem"), False),
    ("a disk", reading("/dev/vda"), False),
    ("kexec", "escaped(call(246, 0, 0, 0, 0) == -1 and ctypes.get_errno() != 1)", False),
    ("a kernel module", "escaped(call(175, 0, 0, 0) == -1 and ctypes.get_errno() != 1)", False),
    ("setuid", "os.setuid(0); escaped(os.getuid() == 0 and os.listdir('/root'))", False),
    ("a setuid binary", "escaped(not os.system('su -c true </dev/null >/dev/null 2>&1'))", False),
    ("capabilities", "escaped(any(libc.prctl(24, c, 0, 0, 0) == 1 for c in range(41)))", False),
    ("new privileges", "escaped(not nnp())", True),
    ("raising a limit", "import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1)); escaped(True)", False),
    ("a change of the runtime", writing("/usr/bin/env2"), False),
    ("a change of its own program", writing("/program/attempt.py"), False),
    ("a file in the root", writing("/x"), False),
    ("a file in /dev", writing("/dev/x"), False),
    ("the host's /tmp", "escaped(os.listdir('/tmp'))", False),
    ("the host's /dev/shm", "escaped(os.stat('/dev/shm').st_dev == os.stat('/dev').st_dev)", False),
    ("filling /tmp", "fill('/tmp')", False),
    ("filling /dev/shm", "fill('/dev/shm')", False),
    ("a symbolic link to the host", "os.symlink('/etc/passwd', '/tmp/l'); escaped(open('/tmp/l').read(1))", False),
    ("a race of symbolic links", "race()", False),
    ("above the root", "os.chdir('/'); [os.chdir('..') for _ in 'many']; escaped(os.path.exists('etc/passwd'))", False),
    ("typing into the terminal", "import fcntl; fcntl.ioctl(0, 0x5412, b'x'); escaped(True)", False),
    ("extended attributes", "open('/tmp/a', 'w'); os.setxattr('/tmp/a', 'user.a', b'x'); escaped(True)", False),
    ("extended attributes by descriptor", "os.setxattr(open('/tmp/a', 'w').fileno(), 'user.a', b'x'); escaped(True)", False),
    ("larger socket buffers", "import socket as s; s.socketpair()[0].setsockopt(1, 7, 1 << 22); escaped(True)", True),
    ("larger pipes", "import fcntl; fcntl.fcntl(os.pipe()[0], 1031, 1 << 17); escaped(True)", True),
    ("a lease", "import fcntl; fcntl.fcntl(os.open(own(), os.O_RDONLY), 1024, 0); escaped(True)", True),
    ("a lock on a file of the host", "import fcntl; fcntl.flock(os.open('/bin/sh', os.O_RDONLY), 2); escaped(True)", True),
    ("a notice of a folder", "import fcntl; fcntl.fcntl(os.open('/usr/lib', os.O_RDONLY), 1026, 1); escaped(True)", True),
    ("a watch on a folder of the host", "escaped(libc.inotify_add_watch(libc.inotify_init1(0), b'/usr/lib', 2) > 0)", True),
    ("what the host has read", "escaped(call(451, 0, 0, 0, 0) == -1 and ctypes.get_errno() != 1)", True),
    ("calls of the x32 kind", "escaped(call(0x40000000 | 39) > 0 or ctypes.get_errno() != 0)", False),
    ("another architecture's rules", "escaped(call(135, 0xffffffff) != -1)", True),
]  # fmt: skip

MORE = """
def nnp():
    return libc.prctl(39, 0, 0, 0, 0) == 1
def _closed(d):
    try: os.fstat(d); return False
    except OSError: return True
def own():
    path = '/tmp/headrace-lease-%d' % os.getpid()
    open(path, 'w').close()
    return path
def fill(folder):
    # up to 64 MB of files of 4 MB: twice what may lie there
    written = 0
    try:
        for n in range(16):
            with open(f"{folder}/{n}", "wb") as f: written += f.write(bytes(4 << 20))
    except OSError: pass
    escaped(written > 32 << 20)
def race():
    import threading
    def swap():
        for _ in range(2000):
            for target in ("/etc/passwd", "/program"):
                try: os.unlink("/tmp/r")
                except OSError: pass
                try: os.symlink(target, "/tmp/r")
                except OSError: pass
    t = threading.Thread(target=swap); t.start()
    found = 0
    while t.is_alive():
        try: found += len(open("/tmp/r", "rb").read(1))
        except OSError: pass
    escaped(found)
"""


@pytest.fixture(scope="module", params=["users", "user namespace"])
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    as_root = request.param == "users"
    if as_root and not is_machine_root():
        pytest.skip("only root can confine by real users")
    return sandbox_or_skip(as_root=as_root)


def script(attempt: str) -> str:
    body = attempt.replace("\n", "\n    ")
    return f"{CALL}{MORE}try:\n    {body}\nexcept BaseException as error:\n    print('held', type(error).__name__, error)\n"


@pytest.mark.parametrize(("name", "attempt", "harmless"), ATTEMPTS, ids=[one[0] for one in ATTEMPTS])
def test_nothing_gets_out(sandbox: Sandbox, name: str, attempt: str, harmless: bool) -> None:
    program = {"attempt.py": script(attempt).encode()}
    finished = sandbox.run(sandbox.python_command("/program/attempt.py"), files=program)
    assert b"ESCAPED" not in finished.stdout, finished
    if name != "calls of the x32 kind":  # the filter kills for these
        assert b"held" in finished.stdout, finished


@pytest.mark.parametrize("attempt", [one[1] for one in ATTEMPTS if one[2]], ids=[one[0] for one in ATTEMPTS if one[2]])
def test_what_is_held_inside_works_outside(attempt: str) -> None:
    """Unconfined, the same attempts succeed."""
    done = subprocess.run([sys.executable, "-c", script(attempt)], capture_output=True, text=True, timeout=120)
    assert "ESCAPED" in done.stdout, (done.stdout, done.stderr)


def test_the_filter_is_a_whole_program() -> None:
    """Instructions of 8 bytes that end with a return; jumps stay within 255, which the encoding would refuse."""
    program = seccomp_filter()
    assert len(program) % 8 == 0
    assert program[-8] == 0x06
    assert len(set(DENIED.values())) == len(DENIED)
