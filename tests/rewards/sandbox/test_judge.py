"""Programs as people's data sets ask for them get what they earn; those that cheat get nothing."""

from __future__ import annotations

import sys

import pytest

from lit_rlhf.errors import RewardError
from lit_rlhf.rewards.sandbox.runner import Limits, run_tests, way_of_confining

pytest.importorskip("resource")

LIMITS = Limits(seconds=20.0)


def passed(program: str, *tests: str, setup: str = "") -> int:
    numbered = [(str(place), test) for place, test in enumerate(tests)]
    return run_tests([setup, program], numbered, setup, LIMITS).passed


HONEST = {
    "plain": ("def f(x): return x + 1", ["assert f(1) == 2"]),
    "types": (
        "from fractions import Fraction\nimport datetime\n"
        "def f(k): return {'a': [1, (2.5, None)], 'b': {True, 'x'}, 3: b'\\x00', 'c': 1j, 'f': Fraction(1, 3),"
        " 'd': datetime.date(2020, 1, 2), 'big': 10 ** 400, 'r': range(3), 's': '\\ud800'}[k]",
        [
            "assert f('a') == [1, (2.5, None)] and type(f('a')[1]) is tuple",
            "assert f('b') == {True, 'x'}",
            "assert f(3) == b'\\x00' and f('c') == 1j and f('big') == 10 ** 400 and list(f('r')) == [0, 1, 2]",
            "import datetime, fractions\nassert f('f') == fractions.Fraction(1, 3) and f('d').year == 2020",
            "assert f('s') == '\\ud800'",
        ],
    ),
    "in place": (
        "def f(xs): xs.sort()\ndef g(d, s):\n    d['k'] = 1\n    s.clear()",
        [
            "xs = [3, 1]\nassert f(xs) is None and xs == [1, 3]",
            "d, s = {}, {1}\ng(d, s)\nassert d == {'k': 1} and s == set()",
        ],
    ),
    "exceptions": (
        "class Mine(Exception): pass\ndef f(x):\n    if x < 0: raise ValueError('negative')\n    raise Mine('m')",
        [
            "try:\n    f(-1)\nexcept ValueError as error:\n    assert str(error) == 'negative'\nelse:\n"
            "    assert False",
            "try:\n    f(1)\nexcept Mine:\n    pass\nelse:\n    assert False",
        ],
    ),
    "class": (
        "class Stack:\n    def __init__(self): self.items = []\n"
        "    def push(self, x): self.items.append(x); return self\n"
        "    def __len__(self): return len(self.items)\n    def __getitem__(self, i): return self.items[i]\n"
        "    def __contains__(self, x): return x in self.items\n    def __iter__(self): return iter(self.items)",
        [
            "s = Stack()\ns.push(1).push(2)\n"
            "assert len(s) == 2 and s[1] == 2 and 1 in s and list(s) == [1, 2] and s.items == [1, 2]"
        ],
    ),
    "operators": (
        "class V:\n    def __init__(self, x): self.x = x\n    def __add__(self, o): return V(self.x + o.x)\n"
        "    def __eq__(self, o): return self.x == o.x\n    def __repr__(self): return f'V({self.x})'",
        ["assert V(1) + V(2) == V(3) and repr(V(1)) == 'V(1)' and V(1) != V(2)"],
    ),
    "generator": (
        "def f(n):\n    for i in range(n): yield i * i",
        ["assert list(f(200))[-1] == 199 ** 2", "assert next(f(3)) == 0"],
    ),
    "callback": ("def f(g, xs): return [g(x) for x in xs]", ["assert f(lambda x: 2 * x, [1, 2]) == [2, 4]"]),
    "callback raises": (
        "def f(g):\n    try: return g()\n    except KeyError: return 'caught'",
        ["def bad(): raise KeyError('k')\nassert f(bad) == 'caught'"],
    ),
    "curried": ("def f(a): return lambda b: a + b", ["assert f(1)(2) == 3"]),
    "named like a builtin": ("def sum(a, b): return a * b", ["assert sum(2, 5) == 10"]),
    "own helper hides a builtin": (
        "def max(xs): return 'mine'\ndef f(): return max([1])",
        ["assert f() == max(['mine'])"],
    ),
    "dataclass": (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n    y: 'int' = 2\ndef f(): return P(1)",
        ["assert f().x == 1 and f().y == 2 and f() == P(1)"],
    ),
    "counter": (
        "from collections import Counter\ndef f(s): return Counter(s)",
        ["assert f('aab') == {'a': 2, 'b': 1}"],
    ),
    "constant": ("LIMIT = 7", ["assert LIMIT == 7"]),
    "windows line ends": ("def f(x):\r\n    return x\r\n", ["assert f(1) == 1"]),
    "main block is not run": ("def f(): return 1\nif __name__ == '__main__':\n    f(input())", ["assert f() == 1"]),
    "threads and files": (
        "import threading, tempfile\ndef f():\n    found = []\n"
        "    t = threading.Thread(target=found.append, args=(1,))\n"
        "    t.start(); t.join()\n    with tempfile.NamedTemporaryFile('w+') as file:\n"
        "        file.write('x'); file.seek(0)\n"
        "        return found, file.read()",
        ["assert f() == ([1], 'x')"],
    ),
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_programs_pass(name: str) -> None:
    program, tests = HONEST[name]
    verdict = run_tests([program], [(str(i), test) for i, test in enumerate(tests)], "", LIMITS)
    assert (verdict.passed, verdict.problem) == (len(tests), "")


def test_numpy_goes_both_ways() -> None:
    program = "import numpy as np\ndef f(a): return a * np.arange(3), np.float32(1.5)"
    test = (
        "import numpy as np\na, b = f(np.ones(3))\nassert (a == [0, 1, 2]).all() and a.dtype == np.float64 and b == 1.5"
    )
    assert passed(program, test) == 1


def test_setup_is_shared() -> None:
    setup = "import math\nclass Node:\n    def __init__(self, v): self.v, self.next = v, None"
    program = "def total(n): return n.v + (total(n.next) if n.next else 0)\ndef root(x): return math.sqrt(x)"
    tests = ["n = Node(1)\nn.next = Node(2)\nassert total(n) == 3", "assert math.isclose(root(2) ** 2, 2)"]
    assert passed(program, *tests, setup=setup) == 2


CHEATS = {
    "always equal": "class A:\n    def __eq__(self, o): return True\n    def __ne__(self, o): return False\n"
    "def f(x): return A()",
    "int that is equal": "class A(int):\n    def __eq__(self, o): return True\n    __hash__ = None\n"
    "def f(x): return A(9)",
    "str that is equal": "class A(str):\n    def __eq__(self, o): return True\n    __hash__ = None\n"
    "def f(x): return A('9')",
    "builtin replaced": "import builtins\nbuiltins.AssertionError = type(None)\n"
    "builtins.len = lambda *a: 2\ndef f(x): return 9",
    "hides what tests use": "def abs(x): return 2\ndef f(x): return 9",
    "exit": "import sys\nsys.exit(0)",
    "exit inside": "import os\ndef f(x): os._exit(0)",
    "exit later": "import os, threading\nthreading.Timer(0.05, os._exit, (0,)).start()\nimport time\n"
    "def f(x): time.sleep(1); return 2",
    "system exit inside": "def f(x): raise SystemExit(0)",
    "fake report": 'print(\'{"results": [["passed", ""]]}\')\nimport os\nos._exit(0)',
    "fake report on every descriptor": (
        'import os\nfor d in range(64):\n    try: os.write(d, b\'ready\\n{"results": [["passed", ""]]}\')\n'
        "    except OSError: pass\nos._exit(0)"
    ),
    "fake reply": (
        "import sys, gc\nfor o in gc.get_objects():\n    if type(o).__name__ == 'Channel':\n"
        "        [o.send(['value', {'f': 'object'}]) for _ in range(9)]\nimport os\nos._exit(0)"
    ),
    "kills everyone": "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "looks at the caller": "import sys\n"
    "def f(x): return sys._getframe(1).f_locals.get('expected', sys._getframe(2).f_locals)",
    "returns itself": "def f(x): return f",
    "deep value": "def f(x):\n    v = []\n    for _ in range(100000): v = [v]\n    return v",
    "huge value": "def f(x): return 'x' * (64 << 20)",
    "does not compile": "def f(x) return 2",
    "nul": "def f(x): return 2\0",
    "wrong": "def f(x): return 3",
    "no such function": "def g(x): return 2",
    "raises": "def f(x): return 1 / 0",
}


@pytest.mark.parametrize("name", CHEATS)
def test_cheats_get_nothing(name: str) -> None:
    # A test that expects an exception is none that a program passes by leaving.
    expecting = "try:\n    f(1)\nexcept KeyError:\n    pass\nelse:\n    raise AssertionError"
    tests = [("1", expecting), ("2", "assert abs(f(1)) == 2")]
    assert run_tests([CHEATS[name]], tests, "", Limits(seconds=4.0)).passed == 0


def test_a_program_that_leaves_between_tests_keeps_nothing() -> None:
    program = "import os\ndef f(x):\n    if x == 2: os._exit(0)\n    return x"
    verdict = run_tests([program], [("1", "assert f(1) == 1"), ("2", "assert f(2) == 2"), ("3", "assert f(3) == 3")])
    assert (verdict.passed, verdict.total, verdict.completed) == (0, 3, False)
    # SystemExit inside a function is an exception like others: the tests around it do count.
    program = "import sys\ndef f(x):\n    if x == 2: sys.exit(0)\n    return x"
    assert passed(program, "assert f(1) == 1", "assert f(2) == 2", "assert f(3) == 3") == 2


def test_the_program_sees_no_test() -> None:
    program = (
        "import gc, os\nseen = repr([o for o in gc.get_objects() if isinstance(o, (str, list, dict))])\n"
        "env = repr(dict(os.environ)) + open('/proc/self/cmdline').read()\n"
        "def f(): return 'se' + 'cret_4711' in seen + env"
    )
    assert passed(program, "assert f() is False, 'secret_4711'") == 1


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_the_program_cannot_read_the_memory_of_others() -> None:
    if way_of_confining() == "limits":
        pytest.skip("here a program has the rights of the test")
    program = (
        "import glob, os\ndef f():\n    found = []\n    for path in glob.glob('/proc/[0-9]*/mem'):\n"
        "        try: open(path, 'rb').close()\n        except OSError: continue\n        found.append(path)\n"
        "    return len(found)"
    )
    assert passed(program, "assert f() <= 1") == 1  # its own


def test_broken_tests_are_an_error() -> None:
    with pytest.raises(RewardError, match=r"tests are broken.*SyntaxError"):
        run_tests(["def f(): pass"], [("1", "assert f( == 1")])
