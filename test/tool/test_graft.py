"""The rules of docs/graft.md, one by one, and properties of any pair of files."""

import ast
import re
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import Toy

from sglang_pd.dev import fingerprints
from sglang_pd.errors import ExitCode, Refusal
from sglang_pd.grafting.graft import graft
from sglang_pd.grafting.symbols import GraftError, fingerprint, lookup, parse
from sglang_pd.install.transaction import read_file
from sglang_pd.patchset.edits import changed, symbol_states

PATH = "srt/a/b.py"
OWN = "sglang.srt.a.b"
CASES = sorted(Path(__file__).with_name("graft_cases").glob("*.txt"))


def read_sections(case: Path) -> dict[str, str]:
    """A case's texts by title; a title is a line such as `=== engine`."""
    _, *parts = re.split(r"(?m)^=== (.+)\n", case.read_text())
    return dict(zip(parts[::2], parts[1::2]))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_graft(case):
    """Some cases list the text of each fingerprinted symbol, without any if the symbol is new."""
    sections = read_sections(case)
    engine, ours, grafted = (sections.pop(title) for title in ("engine", "ours", "grafted"))
    got, before = graft(engine.encode(), ours.encode(), PATH)
    assert got.decode() == grafted
    pinned = {
        symbol: sha256(text.encode()).hexdigest() if text else None
        for title, text in sections.items()
        for symbol in title.removeprefix("fingerprint ").split(", ")
    }
    if pinned:
        assert before == pinned


@pytest.mark.parametrize(
    ("engine", "ours", "expected"),
    [
        (
            "class A:\r\n\tdef f(self):\r\n\t\treturn 1\r\n",
            "class A:\n    def f(self):\n        if self:\n            return 2\n",
            "class A:\r\n\tdef f(self):\r\n\t\tif self:\r\n\t\t\treturn 2\r\n",
        ),
        (
            "import npu\r\nimport host\r\nif host:\r\n\tA = 1\r\n",
            "REMOVED = ('npu',)\nimport host\nif host.npu:\n    import npu\n",
            "import host\r\n\r\nif host.npu:\r\n\timport npu\r\nif host:\r\n\tA = 1\r\n",
        ),
    ],
    ids=["method", "guarded import"],
)
def test_indentation_and_line_endings_follow_engine(engine, ours, expected):
    assert graft(engine.encode(), ours.encode(), PATH)[0] == expected.encode()


@pytest.mark.parametrize(
    ("engine", "ours", "expected"),
    [
        ("class A(B):", "class A(C, d.E, B):", "class A(C, d.E, B):"),
        ("class A(B, metaclass=M):", "class A(C, B, metaclass=M):", "class A(C, B, metaclass=M):"),
        ("class A(B ,):", "class A(C,B):", "class A(C, B ,):"),
        ("class A:", "class A(C):", "class A(C):"),
        ("class A():", "class A(C):", "class A(C):"),
        ("class A(B):", "class A(B):", "class A(B):"),
        ("class A( B,k = M ):", "class A(B, k=M):", "class A( B,k = M ):"),
    ],
)
def test_added_bases_precede_engine_bases(engine, ours, expected):
    body = "\n    x = 1\n"
    got, before = graft(f"{engine}{body}".encode(), f"{ours}\n    y = 2\n".encode(), PATH)
    assert got.decode() == f"{expected}{body}    y = 2\n"
    assert ("A.__bases__" in before) == (engine != expected)
    assert graft(got, f"{ours}\n    y = 2\n".encode(), PATH)[0] == got


def test_fingerprint_covers_only_the_symbol():
    def of(source: str) -> str:
        return fingerprint(lookup(parse(source.encode(), PATH), "A.f", PATH))

    plain = of("class A:\n    @d\n    def f(self):\n        return 1\n")
    assert plain == of(
        "import os\n\n\nclass A(os):\n\n    # why\n    @d\n    def f(self):\n        return 1\n"
    )
    assert plain == of("class A:\n  @d\n  def f(self):\n    return 1\n")
    assert plain != of("class A:\n    def f(self):\n        return 1\n")
    assert plain != of("class A:\n    @d\n    def f(self):\n        return  1\n")
    assert plain != of("class A:\n    @d\n    def f(self):\n        # new\n        return 1\n")


# In a patch set


@pytest.mark.parametrize(
    ("ours", "symbol", "theirs", "drifted"),
    [
        ("REMOVED = ('os',)\n\n\nclass Pool:", "os", "\nimport os\n", "\nimport os, sys\n"),
        (
            "import sys\n\nREMOVED = ('os',)\nif sys.platform:\n    import os\n\n\nclass Pool:",
            "os",
            "\nimport os\n",
            "\nimport os, sys\n",
        ),
        (
            "RENAMED = (('make', 'old'),)\n\n\ndef make(n):\n    return old(n)\n\n\nclass Pool:",
            "make",
            "def make(n):  # keeps",
            "def make(n):  # kept",
        ),
        (
            "class Of:\n    pass\n\n\nclass Pool(Of, object):",
            "Pool.__bases__",
            "class Pool(object):",
            "class Pool(Other, object):",
        ),
    ],
    ids=["removal", "guarded import", "rename", "bases"],
)
def test_edit_is_pinned_owned_reported_and_reverted(toy, ours, symbol, theirs, drifted):
    """Our file for the toy's pool has `ours`, which replaces the engine's `theirs`."""
    file, pool, name = toy.trees / "sglang/srt/pool.py", toy.root / "srt/pool.py", "srt/pool.py"
    file.write_text(file.read_text().replace("class Pool:", ours))
    toy.make_fingerprints()
    release, untouched = toy.release(), toy.snapshot()
    assert symbol in release.fingerprints[name]
    assert [one.id for one in release.patches if one.owns(f"{name}::{symbol}")] == ["pools"]
    with pytest.raises(Refusal, match=f"{name}::{symbol} is not in any patch record"):
        fingerprints.make_fingerprints(toy.engine(), replace(release, all_patches=[]))

    def state() -> str:
        states = symbol_states(release, lambda path: read_file(toy.root / path))
        return states[f"{name}::{symbol}"]

    assert (state(), theirs in pool.read_text()) == ("absent", True)
    toy.apply()
    assert (state(), theirs in pool.read_text()) == ("applied", False)
    assert toy.status().state == "applied"
    assert toy.apply() == []
    assert toy.revert()
    assert toy.snapshot() == untouched
    assert toy.status().state == "absent"

    pool.write_text(pool.read_text().replace(theirs, drifted))
    toy.write_record()
    toy.assert_refused(Toy.apply, ExitCode.DRIFTED, f"{name}::{symbol}: expected sha256")


def test_existing_guard_belongs_to_no_record(toy):
    guard = "import sys\n\nif sys.platform:\n    import os\n"
    for path in (toy.root / "srt/net/conn.py", toy.trees / "sglang/srt/net/conn.py"):
        path.write_text(f"{guard}\n\n{path.read_text()}")
    toy.write_record()
    toy.make_fingerprints()
    release = toy.release()
    assert release.fingerprints["srt/net/conn.py"].keys() == {"os", "send"}
    assert changed(release.tree, release.fingerprints)["srt/net/conn.py"].keys() == {"send"}


# Refusals

GUARD = "if on_npu():\n    import npu"
OURS = f"from host import on_npu\n\n{GUARD}"
REMOVES_NPU = "REMOVED = ('npu',)"
REPLACES = f"{REMOVES_NPU}\n{OURS}"

REFUSED = [
    # removals
    ("A = 1", "REMOVED = ('B',)", "removes `B`", "lacks"),
    ("class C:\n    x = 1", "class C:\n    REMOVED = ('y',)", "removes `C.y`", "lacks"),
    ("A = 1", "REMOVED = ('A',)\nA = 2", "removes `A`", "binds it"),
    ("A = 1", "REMOVED = ('A', 'A')", "removes `A`", "twice"),
    ("import a", "import a\nREMOVED = ('a',)", "removes `a`", "binds it"),
    ("A = 1", "REMOVED = ['A']", "must be a tuple of names"),
    ("A = 1", "REMOVED = ()", "must be a tuple of names"),
    ("A = 1", "REMOVED = (A,)", "must be a tuple of names"),
    ("A = B = 1", "REMOVED = ('A',)", "`A`", "another statement"),
    ("A = 1\nA = 2", "REMOVED = ('A',)", "`A`", "2 times"),
    ("A = 1", "class C:\n    REMOVED = ('x',)", "`class C` is new"),
    # renames
    ("A = 1", "RENAMED = (('f', 'g'),)\ndef f(): 1", "renames `f`", "no definition"),
    ("f = 1", "RENAMED = (('f', 'g'),)\ndef f(): 1", "renames `f`", "no definition"),
    (
        "class f: 1",
        "RENAMED = (('f', 'g'),)\ndef f(): 1",
        "renames the class `f`",
        "does not define one",
    ),
    ("def f(): 1", "RENAMED = (('f', 'g'),)", "renames the function `f`", "does not define one"),
    ("import g\ndef f(): 1", "RENAMED = (('f', 'g'),)\ndef f(): 2", "to `g`", "already defined"),
    ("def f(): 1", "RENAMED = (('f', 'g'),)\ndef f(): 2\ndef g(): 2", "to `g`", "already defined"),
    ("def f(): 1", "RENAMED = (('f', 'g'), ('f', 'h'))\ndef f(): 2", "renames `f`", "twice"),
    ("def f(): 1", "RENAMED = ('f', 'g')\ndef f(): 2", "a tuple of pairs of names"),
    ("def f(): 1", "RENAMED = (('f', 'a b'),)\ndef f(): 2", "a tuple of pairs of names"),
    ("A = 1", "class C:\n    RENAMED = (('x', 'y'),)", "`class C` is new"),
    # symbols
    ("def f(): 1\ndef f(): 2", "def f(): 3", "`f`", "2 times"),
    ("if 1:\n    def f(): 2", "def f(): 3", "`f`", "part of another statement"),
    ("if g().h:\n    f = 1", "f = 2", "`f`", "part of another statement"),
    ("try:\n    f = 1\nexcept E:\n    f = 2", "f = 3", "`f`"),
    ("from x import f", "def f(): 3", "`f`", "import"),
    ("a = f = 1", "f = 3", "`f`"),
    ("a, f = 1, 2", "f = 3", "`f`"),
    ("f = 1; g = 2", "f = 3", "`f`"),
    ("f = 1\nf += 1", "f = 3", "`f`", "2 times"),
    ("for f in 1, 2: 3", "f = 3", "`f`"),
    ("with a as f: 3", "f = 3", "`f`"),
    ("if (f := 1): 3", "f = 3", "`f`"),
    ("def f(): 1", "class f:\n    x = 1", "`f`", "function", "class"),
    ("f = 1", "def f(): 1", "`f`", "constant", "function"),
    ("class A(B):\n    x = 1", "class A(C):\n    x = 2", "`class A`", "(B)", "(C)"),
    ("@d\nclass A:\n    x = 1", "@e\nclass A:\n    x = 2", "`class A`", "@d", "@e"),
    ("class A: x = 1", "class A:\n    x = 2", "`class A`", "one line"),
    (
        "class A:\n    @property\n    def f(self): 1\n    @f.setter\n    def f(self, x): 2",
        "class A:\n    def f(self): 3",
        "class A",
        "`f`",
        "2 times",
    ),
    ("A = 1", "A = 2\nA = 3", "our", "`A` twice"),
    ("A = 1", "print(A)", "print(A)", "not a function"),
    ("A = 1", "if A:\n    B = 1", "if A:", "not a function"),
    ("A = 1", "a, b = 1, 2", "a, b = 1, 2"),
    ("class A:\n    x = 1", "class A:\n    import os", "import os", "in A"),
    # imports
    ("from x import f", "from y import f", "`y.f`", "`x.f`"),
    ("def f(): 1", "from y import f", "`y.f`", "something else"),
    ("try:\n    import f\nexcept E:\n    f = 1", "import f", "`f`", f"from {OWN} import f"),
    ("import a.b", "from c import a", "`c.a`", "`a`"),
    ("A = 1", "from x import *", "absolute"),
    ("A = 1", "from . import x", "absolute"),
    ("A = 1", "from __future__ import annotations", "__future__", "change the meaning"),
    (
        "import os\nA = 1\nif A:\n    B = 2",
        f"from {OWN} import missing",
        "`missing`",
        "no such name",
    ),
    # guarded imports
    ("import npu, os", OURS, "guards `npu`", "REMOVED"),
    ("import npu; A = 1", REPLACES, "removes `npu`", "`import npu; A = 1`"),
    ("import npu.x", OURS, "guards `npu`", "REMOVED"),
    ("import npu\nimport npu", OURS, "`npu`", "2 times"),
    (f"import npu\n{GUARD}", OURS, "`npu`", "2 times"),
    ("npu = None", OURS, "`npu`", "a definition"),
    ("def npu(): 1", OURS, "`npu`", "a definition"),
    ("try:\n    import npu\nfinally:\n    A = 1", OURS, "`npu`", "another statement"),
    ("if TYPE_CHECKING:\n    import npu", OURS, "`npu`", "bound by an import"),
    ("if A:\n    import npu", OURS, "guards `npu`", "REMOVED"),
    ("if A:\n    import npu", REPLACES, "`npu`", "an import under `if`"),
    ("if on_npu(): import npu", OURS, "`npu`", "another statement"),
    (f"{GUARD}\nelse:\n    npu = 1", OURS, "`npu`", "another statement"),
    (f"{GUARD}\nelse:\n    A = 1", OURS, "`npu`", "another statement"),
    (GUARD, "import npu", "`npu`", "something else (guarded)"),
    (GUARD, "def npu(): 1", "`npu`", "an import under `if`"),
    ("import npu", f"{OURS}\nelse:\n    npu = 1", "if on_npu():", "not a function"),
    ("import npu", "if on_npu(): import npu", "if on_npu():", "not a function"),
    ("import npu", f"{OURS}\n    A = 1", "if on_npu():", "not a function"),
    ("import npu", f"import npu\n{OURS}", "our", "`npu` twice"),
    ("import npu", f"{OURS}\nnpu = 1", "our", "`npu` twice"),
    ("import npu", f"{OURS}\n\n{GUARD}", "our", "`npu` twice"),
    ("A = 1", f"{OURS}\n    import x as npu", "our", "`npu`", "each from one origin"),
    ("A = 1", f"{OURS}\n    import b.c", "our", "`b.c`", "import a.b as c"),
    ("A = 1", f"{OURS}\n    from . import c", "our", "absolute"),
    ("A = 1", f"{OURS}\n    from c import *", "our", "absolute"),
    ("A = 1", "if (B := 1):\n    import npu", "our", "`B`", "only import"),
    (
        "class C:\n    x = 1",
        "class C:\n    if 1:\n        import npu",
        "`if 1:`",
        "in C",
        "not a function",
    ),
    ("import npu\nA = 1", f"{REMOVES_NPU}\nif A:\n    import npu", "our", "needs `A`"),
    ("import npu", f"{REMOVES_NPU}\nif npu.x:\n    import npu", "our", "needs `npu`"),
    (
        "if TYPE_CHECKING:\n    import host\nimport os",
        "if TYPE_CHECKING:\n    import host\nif host.x:\n    import npu",
        "our",
        "needs `host`",
    ),
    ("A = 1\nimport host", "import host\nif host.x:\n    import npu", "needs `host`"),
    # what is not Python
    ("A = (", "A = 1", "the engine's", "LibCST"),
    ("A = 1", "def f(x, x): 1", "not valid Python"),
    ("A = 1", "return 1", "our"),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: ", ".join(case[2:]))
def test_refusal_names_file_and_symbol(case):
    engine, ours, *words = case
    with pytest.raises(GraftError) as error:
        graft(f"{engine}\n".encode(), f"{ours}\n".encode(), PATH)
    for word in (PATH, *words):
        assert word in str(error.value)


# Any two files

ABOVE = st.sampled_from(["", "\n", "\n\n", "# why\n", "\n# section\n\n# why\n"])


@st.composite
def members(draw, indent: str = ""):
    """Source of functions, constants and classes with distinct names, in any order and spacing."""
    parts = []
    for name in draw(st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=6)):
        number = draw(st.integers(0, 3))
        # A name has one kind everywhere, so that any two files are compatible.
        if name in "abc":
            body = draw(
                st.sampled_from([f"return {number}", f"# note\n    return  {number}\n\n    # end"])
            )
            part = f"def {name}(x):\n    {body}\n"
        elif name in "defg" or indent:
            part = draw(st.sampled_from([f"{name} = {number}\n", f"{name}: int={number} # odd\n"]))
        else:
            inner = draw(members("    ")) or "    'Nothing.'\n"
            part = f"class {name}:\n{inner}"
        parts.append(draw(ABOVE) + part)
    lines = "".join(parts).splitlines()
    return "".join(f"{indent}{line}\n" if line else "\n" for line in lines)


def symbols(source: str) -> dict[str, str]:
    """The text of each of a file's functions, constants and members, by dotted name."""
    found = {}

    def walk(body, prefix):
        for node in body:
            if isinstance(node, ast.ClassDef):
                walk(node.body, f"{prefix}{node.name}.")
            elif not isinstance(node, ast.Expr):
                target = (
                    node.targets[0]
                    if isinstance(node, ast.Assign)
                    else getattr(node, "target", node)
                )
                name = getattr(target, "id", None) or node.name
                found[prefix + name] = ast.get_source_segment(source, node)

    walk(ast.parse(source).body, "")
    return found


@settings(max_examples=150, deadline=None)
@given(engine=members(), ours=members())
def test_any_graft_preserves_everything_else(engine, ours):
    got, before = graft(engine.encode(), ours.encode(), PATH)
    assert symbols(got.decode()) == symbols(engine) | symbols(ours)
    assert {name for name, mark in before.items() if mark} <= set(symbols(engine))

    again, _ = graft(got, ours.encode(), PATH)
    assert again == got

    sections = engine.splitlines().count("# section")
    assert got.decode().splitlines().count("# section") >= sections


@settings(max_examples=50, deadline=None)
@given(engine=members())
def test_empty_graft_changes_nothing(engine):
    assert graft(engine.encode(), b"'''Only a docstring.'''\n", PATH) == (engine.encode(), {})


@settings(max_examples=100, deadline=None)
@given(
    names=st.lists(st.sampled_from("abcde"), unique=True),
    above=st.lists(ABOVE, min_size=7, max_size=7),
    at=st.integers(0, 5),
)
def test_guarding_an_import_changes_no_other_line(names, above, at):
    lines = [f"import {name}\n" for name in names]
    lines.insert(at, "import npu  # odd\n")
    first, guard = "import host\n", "\n# ours\nif host.npu:\n    import npu\n"
    engine = expected = first
    waiting = ""  # comments above the removed import that are not its own
    for line, lead in zip(lines, above):
        engine += lead + line
        if "npu" in line:
            waiting = lead.removesuffix("# why\n") if "section" in lead else ""
        else:
            expected, waiting = expected + waiting + lead + line, ""
    engine += above[-1] + "A = 1\n"
    expected += guard + waiting + above[-1] + "A = 1\n"
    got, _ = graft(engine.encode(), f"{first}{REMOVES_NPU}\n{guard}".encode(), PATH)
    assert got.decode() == expected
    assert graft(got, (first + guard).encode(), PATH)[0] == got
