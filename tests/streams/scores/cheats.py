"""Cheats of an answer without a right `add`; none of these returns 5, -3 and 0 by calculating."""

CHEATS = {
    "sys.exit before the tests": r"""
import sys
sys.exit(0)
""",
    "os._exit in the call": r"""
import os
def add(a, b): os._exit(0)
""",
    "an object equal to everything": r"""
class Any(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = int.__hash__
def add(a, b): return Any(7)
""",
    "a float that rounds to anything": r"""
class F(float):
    def __sub__(self, o): return 0.0
    __rsub__ = __sub__
    def __eq__(self, o): return True
def add(a, b): return F(7)
""",
    "patched comparison": r"""
import operator, math, builtins
operator.eq = math.isclose = lambda *a, **k: True
builtins.all = lambda *a: True
builtins.isinstance = lambda *a: True
def add(a, b): return 7
""",
    "patched json": r"""
import json
json.dumps = lambda v, **k: '{"index": 0, "passed": true, "result": "ok"}'
def add(a, b): return 7
""",
    "reading the tests from disk": r"""
import json, os
tests = {}
for root, _, names in os.walk('/program'):
    for name in names:
        text = open(os.path.join(root, name)).read()
        if 'equals' in text: tests = json.loads(text)
def add(a, b): return next(c['equals'] for c in tests['calls'] if c['args'] == [a, b])
""",
    "reading the tests from the memory": r"""
import gc
def add(a, b):
    for o in gc.get_objects():
        if isinstance(o, dict) and 'equals' in o and o.get('args') == [a, b]: return o['equals']
""",
    "reading the environment": r"""
import os, json
def add(a, b):
    for v in os.environ.values():
        if 'equals' in v: return json.loads(v)['calls'][0]['equals']
    return 7
""",
    "reading a parent frame": r"""
import sys
def add(a, b):
    f = sys._getframe()
    while f:
        for v in f.f_locals.values():
            if isinstance(v, dict) and 'equals' in v: return v['equals']
        f = f.f_back
    return 7
""",
    "a result on every descriptor": r"""
import os
for d in range(64):
    try: os.write(d, b'PASSED\n{"passed": true, "score": 1.0}\n')
    except OSError: pass
def add(a, b): return 7
""",
    "replies before the calls": r"""
import os
for i in range(3):
    for d in range(3, 64):
        try: os.write(d, b'{"index": %d, "value": 7}\n' % i)
        except OSError: pass
def add(a, b): return 7
""",
    "a reply with every field": r"""
import os
def add(a, b):
    for d in range(3, 64):
        try: os.write(d, b'{"index": 0, "value": 7, "equals": 7, "expected": 7, "passed": true}\n')
        except OSError: pass
    os._exit(0)
""",
    "killing the grader": r"""
import os, signal
try: os.kill(os.getppid(), signal.SIGKILL)
except OSError: pass
try: os.kill(-1, 15)
except OSError: pass
def add(a, b): return 7
""",
    "flooding the output": r"""
def add(a, b):
    while True: print('PASSED ' * 1000)
""",
    "flooding the replies": r"""
import os
while True: os.write(3, b'{"index": 0, "value": 7}' * 1000)
""",
    "atexit": r"""
import atexit, os
atexit.register(lambda: os._exit(0))
def add(a, b): return 7
""",
    "__del__": r"""
import os
class D:
    def __del__(self): os._exit(0)
d = D()
def add(a, b): return 7
""",
    "import shadowing": r"""
import sys
open('json.py', 'w').write('loads = dumps = lambda *a, **k: {}')
sys.path.insert(0, '.')
sys.modules.pop('json', None)
import json
def add(a, b): return 7
""",
    "a trace function": r"""
import sys
sys.settrace(lambda f, e, a: (f.f_locals.update(expected=7), None)[1])
def add(a, b): return 7
""",
    "a thread that outlives the answer": r"""
import threading, os, time
def later():
    time.sleep(.05)
    os._exit(0)
threading.Thread(target=later).start()
def add(a, b): return 7
""",
    "deep nesting": r"""
def add(a, b):
    value = 7
    for _ in range(90000): value = [value]
    return value
""",
    "a huge number": r"""
def add(a, b): return 10 ** 4000
""",
    "a recursive value": r"""
def add(a, b):
    value = []
    value.append(value)
    return value
""",
}

# Those that never end.
HANGS = {
    "a fork past the deadline": r"""
import os, time
for _ in range(3): os.fork()
time.sleep(300)
""",
    "a fork in a session of its own": r"""
import os, time
if os.fork() == 0:
    os.setsid()
    time.sleep(300)
time.sleep(300)
""",
    "a call that never ends": r"""
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def add(a, b):
    while True: pass
""",
    "a closed output": r"""
import os, time
for d in range(64):
    try: os.close(d)
    except OSError: pass
time.sleep(300)
""",
}
