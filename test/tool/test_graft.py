"""The rules of docs/graft.md, one by one, and properties of any pair of files."""

from dataclasses import replace
from hashlib import sha256
from textwrap import dedent

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_pd.errors import ExitCode, Refusal
from sglang_pd.grafting.graft import graft
from sglang_pd.grafting.symbols import GraftError, fingerprint, lookup, parse
from sglang_pd.install import operations
from sglang_pd.patchset import fingerprints
from sglang_pd.patchset.edits import changed, symbol_states

PATH = "srt/a/b.py"
OWN = "sglang.srt.a.b"


def text(source: str) -> str:
    return dedent(source).lstrip("\n")


def graft_text(engine: str, ours: str) -> str:
    return graft(text(engine).encode(), text(ours).encode(), PATH)[0].decode()


def assert_graft(engine: str, ours: str, expected: str) -> None:
    assert graft_text(engine, ours) == text(expected)


def assert_refused(engine: str, ours: str, *words: str) -> None:
    with pytest.raises(GraftError) as error:
        graft_text(engine, ours)
    for word in words:
        assert word in str(error.value)


def test_function_and_constant_are_replaced_and_rest_is_unchanged():
    assert_graft(
        """
        '''Doc.'''
        A = [1,2 ,3]   # odd


        # section

        # about f
        @deco( 1 )
        def f(x): return  x

        def g( y ):
            return {y:1}
        # trailing
        """,
        """
        '''Ours.'''
        A = 4


        # why f
        def f(x, y):
            return y
        """,
        """
        '''Doc.'''
        A = 4


        # section

        # why f
        def f(x, y):
            return y

        def g( y ):
            return {y:1}
        # trailing
        """,
    )


def test_new_symbols_keep_their_place_among_neighbours():
    assert_graft(
        """
        def f():
            return 1


        def g():
            return 2


        def h():
            return 3
        """,
        """
        FIRST = 0


        def g():
            return 20


        AFTER_G = 1
        LAST = 2
        """,
        """
        def f():
            return 1
        FIRST = 0


        def g():
            return 20


        AFTER_G = 1
        LAST = 2


        def h():
            return 3
        """,
    )


def test_new_symbols_without_neighbours_are_appended():
    assert_graft(
        "A = 1\n", "B = A\n\n\ndef f(): return B\n", "A = 1\nB = A\n\n\ndef f(): return B\n"
    )


@pytest.mark.parametrize("header", ["", "(Base, metaclass=Meta)"])
def test_patched_class_keeps_header_docstring_and_other_members(header):
    assert_graft(
        """
        class A( Base,metaclass = Meta ):
            '''Doc.'''

            x: int = 1
            y = 2

            # old reason
            def f(self): return 1

            class Inner:
                z = 1

            def g(self): return 2
        """,
        f"""
        class A{header}:
            '''Ours.'''

            x: int = 10
            new: int = 3  # a field

            # new reason
            async def f(self):
                return 2

            class Inner:
                z = 2

            def between(self):
                return 3
        """,
        """
        class A( Base,metaclass = Meta ):
            '''Doc.'''

            x: int = 10
            y = 2
            new: int = 3  # a field

            # new reason
            async def f(self):
                return 2

            class Inner:
                z = 2

            def between(self):
                return 3

            def g(self): return 2
        """,
    )


def test_first_field_of_class_follows_docstring():
    assert_graft(
        "class A:\n    '''Doc.'''\n    def f(self): return 1\n",
        "class A:\n    x: int\n",
        "class A:\n    '''Doc.'''\n    x: int\n    def f(self): return 1\n",
    )


def test_new_method_is_separated_by_blank_line():
    assert_graft(
        "class A:\n    def f(self): return 1\n",
        "class A:\n    def new(self):\n        return 2\n",
        "class A:\n    def f(self): return 1\n\n    def new(self):\n        return 2\n",
    )


def test_new_class_is_added_completely():
    assert_graft(
        "A = 1\n",
        "class B(A):\n    '''Doc.'''\n\n    x: int = 1\n",
        "A = 1\n\n\nclass B(A):\n    '''Doc.'''\n\n    x: int = 1\n",
    )


def test_indentation_and_line_endings_follow_engine():
    engine = b"class A:\r\n\tdef f(self):\r\n\t\treturn 1\r\n"
    ours = b"class A:\n    def f(self):\n        if self:\n            return 2\n"
    got, _ = graft(engine, ours, PATH)
    assert got == b"class A:\r\n\tdef f(self):\r\n\t\tif self:\r\n\t\t\treturn 2\r\n"


def test_graft_into_empty_file():
    assert graft_text("", "import os\n\nA = os.sep\n") == "import os\n\nA = os.sep\n"


# Imports


def test_only_missing_imports_are_added_after_the_last_one():
    assert_graft(
        """
        from __future__ import annotations

        import os
        from typing import (
            Dict,
            List,
        )
        from .c import near

        A = 1
        import late
        """,
        """
        from __future__ import annotations

        import os.path
        from typing import Dict, Set
        from typing import Tuple as T

        import numpy as np
        from sglang.srt.a.c import near

        A = 2
        """,
        """
        from __future__ import annotations

        import os
        from typing import (
            Dict,
            List,
        )
        from .c import near
        import os.path
        from typing import Set
        from typing import Tuple as T
        import numpy as np

        A = 2
        import late
        """,
    )


def test_long_import_is_wrapped():
    names = [f"a_rather_long_name_{k}" for k in range(5)]
    got = graft_text("A = 1\n", f"from somewhere import {', '.join(names)}\n")
    assert got == "from somewhere import (\n" + "".join(f"    {n},\n" for n in names) + ")\nA = 1\n"


def test_first_import_of_file_follows_docstring():
    assert_graft("'''Doc.'''\nA = 1\n", "import os\n", "'''Doc.'''\nimport os\nA = 1\n")


def test_type_checking_imports_join_existing_block():
    assert_graft(
        """
        from typing import TYPE_CHECKING
        import a
        if TYPE_CHECKING:
            from x import Y
        A = 1
        """,
        """
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            import a
            from x import Y, Z
        """,
        """
        from typing import TYPE_CHECKING
        import a
        if TYPE_CHECKING:
            from x import Y
            from x import Z
        A = 1
        """,
    )


def test_type_checking_block_is_created_if_missing():
    assert_graft(
        "import a\n\nA = 1\n",
        "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from x import Z\n",
        """
        import a
        from typing import TYPE_CHECKING

        if TYPE_CHECKING:
            from x import Z

        A = 1
        """,
    )


def test_type_checking_only_name_is_imported_for_run_time():
    assert_graft(
        "import typing\nif typing.TYPE_CHECKING:\n    from x import Y\n",
        "from x import Y\n",
        "import typing\nfrom x import Y\nif typing.TYPE_CHECKING:\n    from x import Y\n",
    )


def test_import_from_own_module_is_checked_and_dropped():
    engine = "import os\nA = 1\nif A:\n    B = 2\n"
    ours = f"from {OWN} import A, B, C, os\nC = A + B\n"
    assert graft_text(engine, ours) == "import os\nA = 1\nif A:\n    B = 2\nC = A + B\n"
    assert_refused(engine, f"from {OWN} import missing\n", "`missing`", "no such name")


# Removals


def test_removed_symbols_disappear_and_rest_is_unchanged():
    assert_graft(
        """
        # License
        import os
        from x import (  # why
            a,
            b as c,
            d,
        )


        def f():
            return 1


        class A:
            # of x
            x = 1

            # section

            # of g
            @d
            def g(self):
                return 2

            def h(self):
                return 3


        # last
        B = 1
        """,
        """
        REMOVED = ("os", "c", "f")


        class A:
            REMOVED = ("x", "g")

            def k(self):
                return 4
        """,
        """
        # License
        from x import (  # why
            a,
            d,
        )


        class A:

            # section


            def h(self):
                return 3

            def k(self):
                return 4


        # last
        B = 1
        """,
    )


def test_emptied_class_gets_pass():
    assert graft_text("class A:\n    x = 1\n", "class A:\n    REMOVED = ('x',)\n") == (
        "class A:\n    pass\n"
    )


def check_apply_and_revert(toy, release, symbol: str, untouched, theirs: str) -> None:
    """Checks a symbol's state in pool.py, and that `apply` removes the engine's text, `theirs`."""
    engine, pool = toy.engine(), toy.root / "srt/pool.py"

    def state() -> str:
        def read(path):
            return (toy.root / path).read_bytes() if (toy.root / path).exists() else None

        return symbol_states(release, read)[f"srt/pool.py::{symbol}"]

    assert (state(), theirs in pool.read_text()) == ("absent", True)
    operations.apply(engine, release)
    assert (state(), theirs in pool.read_text()) == ("applied", False)
    assert operations.status(engine, release).state == "applied"
    assert operations.apply(engine, release) == []
    assert operations.revert(engine)
    assert toy.snapshot() == untouched


def test_removal_is_pinned_owned_reported_and_reverted(toy):
    untouched = toy.snapshot()
    ours = toy.trees / "sglang/srt/pool.py"
    ours.write_text(ours.read_text().replace("\n\n\nclass", "\n\nREMOVED = ('os',)\n\n\nclass"))
    toy.make_fingerprints()
    release, engine = toy.release(), toy.engine()
    assert release.fingerprints["srt/pool.py"]["os"] == sha256(b"import os\n").hexdigest()
    with pytest.raises(Refusal, match="srt/pool.py::os is not in any patch record"):
        fingerprints.make_fingerprints(engine, replace(release, all_patches=[]))

    check_apply_and_revert(toy, release, "os", untouched, "import os")


def test_renamed_function_keeps_text_and_can_be_called():
    assert_graft(
        """
        def f(x):  # theirs
            return g(x)


        # of g
        @d
        def g(x):
            return f(x) - 1


        class A:
            y = 1

            async def h(self):
                return 2

            def last(self):
                return 3
        """,
        """
        RENAMED = (("g", "engine_g"),)


        def g(x):
            return 2 * engine_g(x)


        class A:
            RENAMED = (("h", "engine_h"),)

            async def h(self):
                return await self.engine_h()
        """,
        """
        def f(x):  # theirs
            return g(x)


        # of g
        @d
        def engine_g(x):
            return f(x) - 1


        def g(x):
            return 2 * engine_g(x)


        class A:
            y = 1

            async def engine_h(self):
                return 2

            async def h(self):
                return await self.engine_h()

            def last(self):
                return 3
        """,
    )


def test_renamed_class_becomes_base_class():
    engine = """
        class A:
            x = 1

            def f(self):
                return [A.x, super().__init__]

            def g(self):
                return 2


        class B(A):
            pass
        """
    ours = """
        from typing import TYPE_CHECKING

        if TYPE_CHECKING:
            from sglang.srt.a import EngineA

        RENAMED = (("A", "EngineA"),)


        class A(EngineA):
            def f(self):
                return super().f()

            def h(self):
                return 3
        """
    want = """
        class EngineA:
            x = 1

            def f(self):
                return [A.x, super().__init__]

            def g(self):
                return 2


        class A(EngineA):
            def f(self):
                return super().f()

            def h(self):
                return 3


        class B(A):
            pass
        """
    got, before = graft(*(dedent(text).lstrip().encode() for text in (engine, ours)), "srt/a.py")
    assert got.decode() == dedent(want).lstrip()
    # What a vendor's engine must not have changed: the members that ours overrides or adds.
    assert {name: bool(known) for name, known in before.items()} == {
        "A.f": True,
        "A.h": False,
    }


def test_rename_is_fingerprinted_reported_and_reverted(toy):
    ours = toy.trees / "sglang/srt/pool.py"
    ours.write_text(
        "RENAMED = (('grow', 'engine_grow'),)\n\n\ndef grow(pool):\n    return engine_grow(pool)\n"
    )
    theirs = toy.root / "srt/pool.py"
    theirs.write_text(theirs.read_text() + "\n\ndef grow(pool):\n    return pool\n")
    untouched = toy.snapshot()
    toy.make_fingerprints()
    release = toy.release()
    pinned = release.fingerprints["srt/pool.py"]
    assert pinned["grow"] == sha256(b"def grow(pool):\n    return pool\n").hexdigest()
    assert "engine_grow" not in pinned

    check_apply_and_revert(toy, release, "grow", untouched, "\ndef grow(pool):\n    return pool\n")


@pytest.mark.parametrize(
    ("engine", "ours", "words"),
    [
        ("A = 1\n", "RENAMED = (('f', 'g'),)\ndef f(): 1\n", ["renames `f`", "no definition"]),
        ("f = 1\n", "RENAMED = (('f', 'g'),)\ndef f(): 1\n", ["renames `f`", "no definition"]),
        (
            "class f: 1\n",
            "RENAMED = (('f', 'g'),)\ndef f(): 1\n",
            ["renames the class `f`", "does not define one"],
        ),
        (
            "def f(): 1\n",
            "RENAMED = (('f', 'g'),)\n",
            ["renames the function `f`", "does not define one"],
        ),
        (
            "import g\ndef f(): 1\n",
            "RENAMED = (('f', 'g'),)\ndef f(): 2\n",
            ["to `g`", "already defined"],
        ),
        (
            "def f(): 1\n",
            "RENAMED = (('f', 'g'),)\ndef f(): 2\ndef g(): 2\n",
            ["to `g`", "already defined"],
        ),
        (
            "def f(): 1\n",
            "RENAMED = (('f', 'g'), ('f', 'h'))\ndef f(): 2\n",
            ["renames `f`", "twice"],
        ),
        ("def f(): 1\n", "RENAMED = ('f', 'g')\ndef f(): 2\n", ["a tuple of pairs of names"]),
        ("def f(): 1\n", "RENAMED = (('f', 'a b'),)\ndef f(): 2\n", ["a tuple of pairs of names"]),
        ("A = 1\n", "class C:\n    RENAMED = (('x', 'y'),)\n", ["`class C` is new"]),
    ],
)
def test_invalid_renames_are_refused(engine, ours, words):
    with pytest.raises(GraftError) as error:
        graft_text(engine, ours)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("engine", "ours", "words"),
    [
        ("A = 1\n", "REMOVED = ('B',)\n", ["removes `B`", "lacks"]),
        ("class C:\n    x = 1\n", "class C:\n    REMOVED = ('y',)\n", ["removes `C.y`", "lacks"]),
        ("A = 1\n", "REMOVED = ('A',)\nA = 2\n", ["removes `A`", "binds it"]),
        ("A = 1\n", "REMOVED = ('A', 'A')\n", ["removes `A`", "twice"]),
        ("import a\n", "import a\nREMOVED = ('a',)\n", ["removes `a`", "binds it"]),
        ("A = 1\n", "REMOVED = ['A']\n", ["must be a tuple of names"]),
        ("A = 1\n", "REMOVED = ()\n", ["must be a tuple of names"]),
        ("A = 1\n", "REMOVED = (A,)\n", ["must be a tuple of names"]),
        ("A = B = 1\n", "REMOVED = ('A',)\n", ["`A`", "another statement"]),
        ("A = 1\nA = 2\n", "REMOVED = ('A',)\n", ["`A`", "2 times"]),
        ("A = 1\n", "class C:\n    REMOVED = ('x',)\n", ["`class C` is new"]),
    ],
)
def test_invalid_removals_are_refused(engine, ours, words):
    assert_refused(engine, ours, PATH, *words)


# Bases


@pytest.mark.parametrize(
    ("engine", "ours", "expected"),
    [
        ("class A(B):", "class A(C, d.E, B):", "class A(C, d.E, B):"),
        ("class A(B, metaclass=M):", "class A(C, B, metaclass=M):", "class A(C, B, metaclass=M):"),
        ("class A(B ,):", "class A(C,B):", "class A(C, B ,):"),
        ("class A:", "class A(C):", "class A(C):"),
        ("class A():", "class A(C):", "class A(C):"),
        ("class A(B):", "class A(B):", "class A(B):"),
    ],
)
def test_added_bases_precede_engine_bases(engine, ours, expected):
    body = "\n    x = 1\n"
    got, before = graft(f"{engine}{body}".encode(), f"{ours}\n    y = 2\n".encode(), PATH)
    assert got.decode() == f"{expected}{body}    y = 2\n"
    assert ("A.__bases__" in before) == (engine != expected)
    assert graft(got, f"{ours}\n    y = 2\n".encode(), PATH)[0] == got


def test_bases_are_fingerprinted_owned_and_reverted(toy):
    untouched = toy.snapshot()
    ours = toy.trees / "sglang/srt/pool.py"
    of_ours = "class Of:\n    pass\n\n\nclass Pool(Of, object):"
    ours.write_text(ours.read_text().replace("class Pool:", of_ours))
    toy.make_fingerprints()
    release, engine = toy.release(), toy.engine()
    assert "Pool.__bases__" in release.fingerprints["srt/pool.py"]
    operations.apply(engine, release)
    assert operations.status(engine, release).state == "applied"
    assert operations.revert(engine)
    assert toy.snapshot() == untouched
    pool = toy.root / "srt/pool.py"
    pool.write_text(pool.read_text().replace("class Pool(object):", "class Pool(Other, object):"))
    toy.write_record()
    with pytest.raises(Refusal, match="Pool.__bases__: expected sha256"):
        operations.apply(engine, release)


# Guarded imports

GUARD = "if on_npu():\n    import npu\n"
REMOVES_NPU = "REMOVED = ('npu',)\n"
OURS = f"from host import on_npu\n\n{GUARD}"
REPLACES = REMOVES_NPU + OURS


def test_guarded_import_replaces_plain_import():
    assert_graft(
        """
        # License

        import torch

        # why theirs
        import npu  # noqa: F401

        from host import size
        if TYPE_CHECKING:
            from x import Y

        A = 1
        """,
        """
        '''Ours.'''
        from host import on_npu

        REMOVED = ("npu",)

        # section

        # why ours
        if on_npu():
            # after the rest
            import npu


        def f():
            return npu.version
        """,
        """
        # License

        import torch

        from host import size
        from host import on_npu

        # why ours
        if on_npu():
            # after the rest
            import npu
        if TYPE_CHECKING:
            from x import Y

        A = 1


        def f():
            return npu.version
        """,
    )


def test_missing_guarded_imports_are_added():
    second = "if a.b:\n    from c import d as e\n"
    assert_graft(
        "import a\n\nA = 1\n",
        f"{OURS}{second}",
        f"import a\nfrom host import on_npu\n\n{GUARD}\n{second}\nA = 1\n",
    )


def test_file_header_comments_survive_removed_import():
    assert_graft(
        "# License\nimport npu\nimport host\n", REPLACES, f"# License\nimport host\n{OURS}"
    )
    assert_graft("# License\nimport npu\nA = 1\n", REMOVES_NPU, "# License\nA = 1\n")


def test_one_guard_for_several_imports():
    engine = b"from .k import (\n    a,\n    b,\n)\nimport os\nimport npu\nA = a\n"
    ours = b"if os.sep:\n    import npu\n    from sglang.srt.a.k import a, b\n    import c as d\n"
    got, before = graft(engine, b"import os\nREMOVED = ('npu', 'a', 'b')\n" + ours, PATH)
    assert got == b"import os\n\n" + ours + b"A = a\n"
    module = parse(engine, PATH)
    assert before == {
        "npu": fingerprint(module.body[2]),
        "a": fingerprint(module.body[0]),
        "b": fingerprint(module.body[0]),
        "d": None,
    }


def test_guard_follows_indentation_and_line_endings():
    engine = b"import npu\r\nimport host\r\nif host:\r\n\tA = 1\r\n"
    ours = f"{REMOVES_NPU}import host\nif host.npu:\n    import npu\n"
    got, _ = graft(engine, ours.encode(), PATH)
    assert got == (b"import host\r\n\r\nif host.npu:\r\n\timport npu\r\nif host:\r\n\tA = 1\r\n")


def test_existing_equal_guard_is_unchanged():
    engine = f"import os\nfrom host import on_npu\nB = 1\n# theirs\n{GUARD}A = 1\n".encode()
    got, before = graft(engine, OURS.encode(), PATH)
    assert got == engine
    assert before == {"npu": sha256(GUARD.encode()).hexdigest()}


def test_guarded_import_is_pinned_owned_reported_and_reverted(toy):
    """The toy's pool imports `os`; ours guards it."""
    untouched = toy.snapshot()
    ours = toy.trees / "sglang/srt/pool.py"
    guard = "import sys\n\nREMOVED = ('os',)\nif sys.platform:\n    import os\n"
    ours.write_text(ours.read_text().replace("\n\n\nclass", f"\n{guard}\n\nclass"))
    toy.make_fingerprints()
    release, engine = toy.release(), toy.engine()
    assert release.fingerprints["srt/pool.py"]["os"] == sha256(b"import os\n").hexdigest()
    owned = [record for record in release.patches if record.owns("srt/pool.py::os")]
    assert [record.id for record in owned] == ["pools"]
    with pytest.raises(Refusal, match="srt/pool.py::os is not in any patch record"):
        fingerprints.make_fingerprints(engine, replace(release, all_patches=[]))

    def state() -> str:
        return symbol_states(release, lambda path: (toy.root / path).read_bytes())[
            "srt/pool.py::os"
        ]

    operations.apply(engine, release)
    assert (state(), operations.status(engine, release).state) == ("applied", "applied")
    assert operations.apply(engine, release) == []
    assert operations.revert(engine)
    assert toy.snapshot() == untouched
    assert operations.status(engine, release).state == "absent"

    pool = toy.root / "srt/pool.py"
    pool.write_text(pool.read_text().replace("import os\n", "import os, sys\n"))
    toy.write_record()
    with pytest.raises(Refusal, match="srt/pool.py::os: expected sha256") as error:
        operations.apply(engine, release)
    assert error.value.code == ExitCode.DRIFTED


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


@pytest.mark.parametrize(
    ("engine", "ours", "words"),
    [
        ("def f(): 1\ndef f(): 2\n", "def f(): 3\n", ["`f`", "2 times"]),
        ("if 1:\n    def f(): 2\n", "def f(): 3\n", ["`f`", "part of another statement"]),
        ("try:\n    f = 1\nexcept E:\n    f = 2\n", "f = 3\n", ["`f`"]),
        ("from x import f\n", "def f(): 3\n", ["`f`", "import"]),
        ("a = f = 1\n", "f = 3\n", ["`f`"]),
        ("a, f = 1, 2\n", "f = 3\n", ["`f`"]),
        ("f = 1; g = 2\n", "f = 3\n", ["`f`"]),
        ("f = 1\nf += 1\n", "f = 3\n", ["`f`", "2 times"]),
        ("for f in 1, 2: 3\n", "f = 3\n", ["`f`"]),
        ("with a as f: 3\n", "f = 3\n", ["`f`"]),
        ("if (f := 1): 3\n", "f = 3\n", ["`f`"]),
        ("def f(): 1\n", "class f:\n    x = 1\n", ["`f`", "function", "class"]),
        ("f = 1\n", "def f(): 1\n", ["`f`", "constant", "function"]),
        ("class A(B):\n    x = 1\n", "class A(C):\n    x = 2\n", ["`class A`", "(B)", "(C)"]),
        ("@d\nclass A:\n    x = 1\n", "@e\nclass A:\n    x = 2\n", ["`class A`", "@d", "@e"]),
        ("class A: x = 1\n", "class A:\n    x = 2\n", ["`class A`", "one line"]),
        (
            "class A:\n    @property\n    def f(self): 1\n    @f.setter\n    def f(self, x): 2\n",
            "class A:\n    def f(self): 3\n",
            ["class A", "`f`", "2 times"],
        ),
        ("A = 1\n", "A = 2\nA = 3\n", ["our", "`A` twice"]),
        ("A = 1\n", "print(A)\n", ["print(A)", "not a function"]),
        ("A = 1\n", "if A:\n    B = 1\n", ["if A:", "not a function"]),
        ("A = 1\n", "a, b = 1, 2\n", ["a, b = 1, 2"]),
        ("class A:\n    x = 1\n", "class A:\n    import os\n", ["import os", "in A"]),
        ("from x import f\n", "from y import f\n", ["`y.f`", "`x.f`"]),
        ("def f(): 1\n", "from y import f\n", ["`y.f`", "something else"]),
        (
            "try:\n    import f\nexcept E:\n    f = 1\n",
            "import f\n",
            ["`f`", f"from {OWN} import f"],
        ),
        ("import a.b\n", "from c import a\n", ["`c.a`", "`a`"]),
        ("A = 1\n", "from x import *\n", ["absolute"]),
        ("A = 1\n", "from . import x\n", ["absolute"]),
        ("A = 1\n", "from __future__ import annotations\n", ["__future__", "change the meaning"]),
        ("A = 1\n", "return 1\n", ["our"]),
        ("if g().h:\n    f = 1\n", "f = 2\n", ["`f`", "part of another statement"]),
        ("import npu, os\n", OURS, ["guards `npu`", "REMOVED"]),
        ("import npu; A = 1\n", REPLACES, ["removes `npu`", "`import npu; A = 1`"]),
        ("import npu.x\n", OURS, ["guards `npu`", "REMOVED"]),
        ("import npu\nimport npu\n", OURS, ["`npu`", "2 times"]),
        (f"import npu\n{GUARD}", OURS, ["`npu`", "2 times"]),
        ("npu = None\n", OURS, ["`npu`", "a definition"]),
        ("def npu(): 1\n", OURS, ["`npu`", "a definition"]),
        ("try:\n    import npu\nfinally:\n    A = 1\n", OURS, ["`npu`", "another statement"]),
        ("if TYPE_CHECKING:\n    import npu\n", OURS, ["`npu`", "bound by an import"]),
        ("if A:\n    import npu\n", OURS, ["guards `npu`", "REMOVED"]),
        ("if A:\n    import npu\n", REPLACES, ["`npu`", "an import under `if`"]),
        ("if on_npu(): import npu\n", OURS, ["`npu`", "another statement"]),
        (f"{GUARD}else:\n    npu = 1\n", OURS, ["`npu`", "another statement"]),
        (f"{GUARD}else:\n    A = 1\n", OURS, ["`npu`", "another statement"]),
        (GUARD, "import npu\n", ["`npu`", "something else (guarded)"]),
        (GUARD, "def npu(): 1\n", ["`npu`", "an import under `if`"]),
        ("import npu\n", f"{OURS}else:\n    npu = 1\n", ["if on_npu():", "not a function"]),
        ("import npu\n", "if on_npu(): import npu\n", ["if on_npu():", "not a function"]),
        ("import npu\n", f"{OURS}    A = 1\n", ["if on_npu():", "not a function"]),
        ("import npu\n", f"import npu\n{OURS}", ["our", "`npu` twice"]),
        ("import npu\n", f"{OURS}npu = 1\n", ["our", "`npu` twice"]),
        ("import npu\n", f"{OURS}\n{GUARD}", ["our", "`npu` twice"]),
        ("A = 1\n", f"{OURS}    import x as npu\n", ["our", "`npu`", "each from one origin"]),
        ("A = 1\n", f"{OURS}    import b.c\n", ["our", "`b.c`", "import a.b as c"]),
        ("A = 1\n", f"{OURS}    from . import c\n", ["our", "absolute"]),
        ("A = 1\n", f"{OURS}    from c import *\n", ["our", "absolute"]),
        ("A = 1\n", "if (B := 1):\n    import npu\n", ["our", "`B`", "only import"]),
        (
            "class C:\n    x = 1\n",
            "class C:\n    if 1:\n        import npu\n",
            ["`if 1:`", "in C", "not a function"],
        ),
        ("import npu\nA = 1\n", f"{REMOVES_NPU}if A:\n    import npu\n", ["our", "needs `A`"]),
        ("import npu\n", f"{REMOVES_NPU}if npu.x:\n    import npu\n", ["our", "needs `npu`"]),
        (
            "if TYPE_CHECKING:\n    import host\nimport os\n",
            "if TYPE_CHECKING:\n    import host\nif host.x:\n    import npu\n",
            ["our", "needs `host`"],
        ),
        ("A = 1\nimport host\n", "import host\nif host.x:\n    import npu\n", ["needs `host`"]),
        ("A = (\n", "A = 1\n", ["the engine's", "LibCST"]),
        ("A = 1\n", "def f(x, x): 1\n", ["not valid Python"]),
    ],
)
def test_refusals_name_the_symbol(engine, ours, words):
    assert_refused(engine, ours, PATH, *words)


def test_fingerprint_covers_only_the_symbol():
    def of(source: str, symbol: str = "A.f") -> str:
        return fingerprint(lookup(parse(text(source).encode(), PATH), symbol, PATH))

    plain = of("class A:\n    @d\n    def f(self):\n        return 1\n")
    assert plain == of(
        "import os\n\n\nclass A(os):\n\n    # why\n    @d\n    def f(self):\n        return 1\n"
    )
    assert plain == of("class A:\n  @d\n  def f(self):\n    return 1\n")
    assert plain != of("class A:\n    def f(self):\n        return 1\n")
    assert plain != of("class A:\n    @d\n    def f(self):\n        return  1\n")
    assert plain != of("class A:\n    @d\n    def f(self):\n        # new\n        return 1\n")


# Any two files

NAMES = list("abcdefgh")


@st.composite
def members(draw, indent: str = ""):
    """Source of functions, constants and classes with distinct names, in any order and spacing."""
    parts = []
    for name in draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=6)):
        number = draw(st.integers(0, 3))
        above = draw(st.sampled_from(["", "\n", "\n\n", "# why\n", "\n# section\n\n# why\n"]))
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
        parts.append(above + part)
    lines = "".join(parts).splitlines()
    return "".join(f"{indent}{line}\n" if line else "\n" for line in lines)


def symbols(source: str) -> dict[str, str]:
    """The text of each of a file's functions, constants and members, by dotted name."""
    import ast

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


ABOVE = st.sampled_from(["", "\n", "# why\n", "\n# section\n\n# why\n"])


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
    got, _ = graft(engine.encode(), (first + REMOVES_NPU + guard).encode(), PATH)
    assert got.decode() == expected
    assert graft(got, (first + guard).encode(), PATH)[0] == got
