"""Grafts our file onto the engine's file of the same path, by the rules in docs/graft.md."""

import ast
import builtins
from collections.abc import Iterable, Sequence

import libcst as cst

from sglang_pd.grafting.symbols import (
    BASES,
    Binding,
    Definition,
    GraftError,
    absolute_module,
    bases,
    bases_statement,
    bindings,
    body_statements,
    code_of,
    find_binding,
    fingerprint,
    imported_bindings,
    imports_of,
    is_guarded_import,
    is_typing_block,
    parse,
    symbol_name,
)

WIDTH = 88
REMOVED = "REMOVED"  # in our file, a tuple of the engine's names to remove
# In our file, a tuple of pairs: an engine definition that ours replaces, and its new name.
RENAMED = "RENAMED"
BLANK = cst.EmptyLine(indent=False)


def module_name(path: str) -> str:
    """Converts `srt/a/b.py` to `sglang.srt.a.b`; keeps a package's `__init__` as the last part."""
    return ".".join(["sglang", *path.removesuffix(".py").split("/")])


def graft(engine: bytes, ours: bytes, path: str) -> tuple[bytes, dict[str, str | None]]:
    """Returns the engine's file with our symbols in it, and their fingerprints in the original.

    path: both files' path below `sglang/`. A fingerprint is None if the engine lacks the symbol.
    Raises GraftError, which names the symbol, if the files do not fit together.
    """
    module = parse(engine, f"the engine's {path}")
    if module.bytes != engine:
        raise GraftError(f"the engine's {path} does not round-trip through LibCST")
    return _Grafter(path).run(module, parse(ours, f"our {path}"))


class _Grafter:
    def __init__(self, path: str):
        self.path = path
        self.module = module_name(path)
        self.before: dict[str, str | None] = {}

    def run(self, engine: cst.Module, ours: cst.Module) -> tuple[bytes, dict[str, str | None]]:
        imports, typing, guarded, symbols = self._classify(ours)
        bound = {name for s in ours.body if s not in guarded for name in bindings(s, self.module)}
        body, symbols, renamed = self._apply_directives(list(engine.body), symbols, "", bound)
        body = self._add_imports(body, imports, typing, set(map(symbol_name, symbols)))
        body = self._add_guarded_imports(body, guarded, ours)
        body = self._merge_symbols(body, symbols, "", renamed)
        if body and not engine.body:
            engine = engine.with_changes(has_trailing_newline=True)
        grafted = engine.with_changes(body=body).bytes
        try:
            compile(grafted, self.path, "exec", dont_inherit=True)
        except SyntaxError as error:
            text = f"{self.path}: the grafted file is not valid Python: {error}"
            raise GraftError(text) from error
        return grafted, self.before

    def _where(self, scope: str) -> str:
        """Names the engine's module or class in errors. scope: "", or a class with a final dot."""
        return f"the engine's {self.path}{f', class {scope[:-1]}' if scope else ''}"

    def _classify(self, ours: cst.Module):
        """Splits our module into imports, type-checking imports, guarded imports and symbols."""
        imports: list[cst.CSTNode] = []
        typing: list[cst.CSTNode] = []
        guarded: list[cst.If] = []
        symbols: list[cst.CSTNode] = []
        for statement in _without_docstring(ours.body):
            if small := imports_of(statement):
                imports += small
            elif is_typing_block(statement) and all(map(imports_of, statement.body.body)):
                typing += [small for line in statement.body.body for small in imports_of(line)]
            elif is_guarded_import(statement):
                guarded.append(statement)
            else:
                symbols.append(statement)
        return imports, typing, guarded, symbols

    # Imports

    def _add_imports(self, body: list, imports: list, typing: list, ours: set) -> list:
        """Returns the engine's statements, with those of our imports that they lack."""
        table: dict[str, list[Binding]] = {}
        for statement in body:
            for name, bound in bindings(statement, self.module).items():
                table.setdefault(name, []).append(bound)
        lines = [
            line for node in imports if (line := self._missing_import(node, table, ours, False))
        ]
        typed = [line for node in typing if (line := self._missing_import(node, table, ours, True))]
        block = next((at for at, s in enumerate(body) if is_typing_block(s)), None)
        if typed and block is not None:
            body[block] = body[block].with_deep_changes(
                body[block].body, body=[*body[block].body.body, *map(cst.parse_statement, typed)]
            )
        elif typed:
            if "TYPE_CHECKING" not in table:
                lines.append("from typing import TYPE_CHECKING")
            indented = "".join(f"    {part}\n" for line in typed for part in line.split("\n"))
            lines.append(f"\nif TYPE_CHECKING:\n{indented}")
        at = _after_imports(body)
        return [*body[:at], *map(cst.parse_statement, lines), *body[at:]]

    def _missing_import(
        self, node, table: dict[str, list[Binding]], ours: set, typing: bool
    ) -> str | None:
        """Returns our import, reduced to names that the engine's file lacks; None if it has all."""
        if isinstance(node, cst.ImportFrom):
            self._check_absolute(node)
            if absolute_module(node, self.module) == self.module:
                return self._check_own_import(node, table, ours)
        wanted = []
        for alias, names in imported_bindings(node, self.module):
            if "typing.TYPE_CHECKING" in names.values():
                continue
            known = [self._is_bound(name, at, table, typing) for name, at in names.items()]
            if not all(known):
                as_name = f" as {alias.evaluated_alias}" if alias.asname else ""
                wanted.append(alias.evaluated_name + as_name)
        if not wanted:
            return None
        if isinstance(node, cst.Import):
            return f"import {', '.join(wanted)}"
        source = absolute_module(node, self.module)
        if source == "__future__":
            raise GraftError(
                f"our {self.path}: `from __future__ import {', '.join(wanted)}` would "
                "change the meaning of the engine's code, whose file lacks it; remove it from ours"
            )
        line = f"from {source} import {', '.join(wanted)}"
        if len(line) <= WIDTH:
            return line
        return "\n".join([f"from {source} import (", *(f"    {name}," for name in wanted), ")"])

    def _check_absolute(self, node: cst.ImportFrom) -> None:
        if isinstance(node.names, cst.ImportStar) or node.relative:
            raise GraftError(
                f"our {self.path}: imports must be absolute, and name what they import"
            )

    def _check_own_import(self, node: cst.ImportFrom, table: dict, ours: set) -> None:
        """Checks an import of the file's own module: it only shows linters the engine's names."""
        for alias in node.names:
            if alias.asname or not (alias.evaluated_name in table or alias.evaluated_name in ours):
                raise GraftError(
                    f"our {self.path} imports `{alias.evaluated_name}` from its own module, which "
                    "has no such name"
                )

    def _is_bound(
        self, name: str, origin: str, table: dict[str, list[Binding]], typing: bool
    ) -> bool:
        """Whether the engine's file has the name; GraftError if it means something else there."""
        bounds = table.get(name, [])
        for bound in bounds:
            if bound.kind not in ("import", "typing") or bound.origin != origin:
                other = bound.origin not in ("", origin)
                meaning = f"`{bound.origin}`" if other else f"something else ({bound.kind})"
                raise GraftError(
                    f"our {self.path} imports `{origin}` as `{name}`, which is {meaning} in the "
                    "engine's file; import it under another name, or, to use the engine's own, "
                    f"write `from {self.module} import {name}` under `if TYPE_CHECKING:`"
                )
        return any(typing or bound.kind == "import" for bound in bounds)

    # Removals and renames

    def _apply_directives(
        self, body: list, ours: Sequence, scope: str, bound: Iterable[str] = ()
    ) -> tuple[list, list, dict[str, str]]:
        """Removes and renames the engine's symbols as ours say.

        bound: further names that our statements bind. Returns the engine's statements, our symbols,
        and {renamed: new name}.
        """
        symbols = [s for s in ours if symbol_name(s) not in (REMOVED, RENAMED)]
        by_name = {symbol_name(s): s for s in symbols}
        removed = self._parse_directive(ours, REMOVED, scope)
        renamed = self._parse_directive(ours, RENAMED, scope)
        names = [name for name, _ in renamed]
        if twice := {name for name in names if names.count(name) > 1}:
            raise GraftError(f"our {self.path} renames `{scope}{min(twice)}` twice")
        body = self._remove_symbols(body, removed, {*by_name, *bound}, scope)
        body = self._rename_definitions(body, dict(renamed), by_name, scope)
        return body, symbols, dict(renamed)

    def _parse_directive(self, ours: Sequence, name: str, scope: str) -> list:
        """Returns the elements that we assign to REMOVED (names) or RENAMED (pairs)."""
        found: list = []
        for statement in (s for s in ours if symbol_name(s) == name):
            try:
                elements = ast.literal_eval(code_of(statement.body[0].value).strip())
            except ValueError:
                elements = None
            is_element = _is_name if name == REMOVED else _is_pair
            is_tuple = isinstance(elements, tuple) and len(elements) > 0
            if not (is_tuple and all(map(is_element, elements))):
                raise GraftError(
                    f"our {self.path}: `{_first_line(statement)}` in "
                    f"{scope[:-1] or 'the module'} must be "
                    f"a tuple of {'names' if name == REMOVED else 'pairs of names'}"
                )
            found += elements
        return found

    def _rename_definitions(
        self, body: list, names: dict[str, str], ours: dict, scope: str
    ) -> list:
        """Renames the engine's definitions whose names our definitions take."""
        where = self._where(scope)
        for name, new in names.items():
            at, symbol = find_binding(body, name, where), scope + name
            if at is None or not isinstance(body[at], Definition):
                raise GraftError(
                    f"our {self.path} renames `{symbol}`; {where} has no definition of it"
                )
            if type(ours.get(name)) is not type(body[at]):
                raise GraftError(
                    f"our {self.path} renames the {_kind(body[at])} `{symbol}`, but does not "
                    "define one"
                )
            if new in ours or any(new in bindings(s, self.module) for s in body):
                raise GraftError(
                    f"our {self.path} renames `{symbol}` to `{new}`, which is already defined"
                )
            self._record_overridden(body[at], ours[name], symbol)
            body[at] = body[at].with_changes(name=cst.Name(new))
        return body

    def _record_overridden(self, theirs: cst.CSTNode, ours: cst.CSTNode, symbol: str) -> None:
        """Records a renamed definition's fingerprint; of a class, only those of members in ours."""
        if not isinstance(theirs, cst.ClassDef):
            self.before[symbol] = fingerprint(theirs)
            return
        where = f"the engine's {self.path}, class {symbol}"
        members = body_statements(theirs, where)
        for name in filter(None, map(symbol_name, body_statements(ours, f"our {self.path}"))):
            at = find_binding(members, name, where)
            self.before[f"{symbol}.{name}"] = None if at is None else fingerprint(members[at])

    def _remove_symbols(self, body: list, names: list[str], ours: set, scope: str) -> list:
        """Removes our REMOVED names from the statements of the engine's module or class."""
        where = self._where(scope)
        for name in names:
            at = find_binding(body, name, where, ("symbol", "import"))
            if at is None:
                raise GraftError(f"our {self.path} removes `{scope}{name}`, which {where} lacks")
            if symbol_name(body[at]) is None and not imports_of(body[at]):
                raise GraftError(
                    f"our {self.path} removes `{scope}{name}`, which {where} binds together with "
                    f"something else: `{_first_line(body[at])}`"
                )
            if name in ours or names.count(name) > 1:
                raise GraftError(f"our {self.path} removes `{scope}{name}` twice, or also binds it")
            self.before[scope + name] = fingerprint(body[at])
        places = {find_binding(body, name, where, ("symbol", "import")) for name in names}
        for at in sorted(places, reverse=True):
            rest = _without_names(body[at], set(names))
            if rest is not None:
                body[at] = rest
                continue
            lines = body[at].leading_lines
            lines = _split_comments(lines)[0] if at or scope else lines  # keep a file's header
            if at + 1 < len(body):
                more = body[at + 1].leading_lines
                lines = lines if any(line.comment for line in lines) else ()
                body[at + 1] = body[at + 1].with_changes(leading_lines=[*lines, *more])
            del body[at]
        return body

    # Guarded imports

    def _add_guarded_imports(self, body: list, blocks: list[cst.If], ours: cst.Module) -> list:
        """Adds our guarded imports to the engine's statements, below its imports."""
        place, where = _after_imports(body), self._where("")
        added = []
        for block in blocks:
            names = self._guarded_names(block, ours)
            found = [find_binding(body, name, where, ("import", "guarded")) for name in names]
            if any(at is not None and fingerprint(body[at]) == fingerprint(block) for at in found):
                self.before.update(dict.fromkeys(names, fingerprint(block)))
                continue  # the engine has the same block
            if bound := [name for name, at in zip(names, found) if at is not None]:
                raise GraftError(
                    f"our {self.path} guards {_quoted(bound)}, which {where} imports in another "
                    f"way; add it to {REMOVED}"
                )
            for name in names:
                self.before.setdefault(name, None)
            _, comments = _split_comments(block.leading_lines)
            added.append(block.with_changes(leading_lines=[BLANK, *comments]))
        for block in added:
            self._check_guard_test(block, body[:place])
        return [*body[:place], *added, *body[place:]]

    def _guarded_names(self, block: cst.If, ours: cst.Module) -> list[str]:
        """Checks our block, and returns the names that it binds."""
        for node in (node for line in block.body.body for node in imports_of(line)):
            if isinstance(node, cst.ImportFrom):
                self._check_absolute(node)
        bounds = bindings(block, self.module)
        for name, bound in bounds.items():
            if bound.kind != "guarded" or "." in name:
                raise GraftError(
                    f"our {self.path}: `{_first_line(block)}` binds `{name}`, but may only "
                    "import plain names, each from one origin (`import a.b as c`)"
                )
            if sum(name in bindings(s, self.module) for s in ours.body) > 1:
                raise GraftError(
                    f"our {self.path} binds `{name}` twice, once in `{_first_line(block)}`"
                )
        return list(bounds)

    def _check_guard_test(self, block: cst.If, top: list) -> None:
        """Checks that the test's names are imported above it, which compiling does not check."""
        tree = ast.parse(code_of(block.test).strip(), mode="eval")
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        above = (item for s in top for item in bindings(s, self.module).items())
        bound = {name for name, how in above if how.kind == "import"}
        if missing := names - bound - set(dir(builtins)):
            raise GraftError(
                f"our {self.path}: `{_first_line(block)}` needs {_quoted(missing)}, which nothing "
                "imports above the engine's first line of code, where the block is placed"
            )

    # Symbols

    def _merge_symbols(
        self, body: list, ours: Sequence, scope: str, renamed: dict[str, str]
    ) -> list:
        """Replaces or adds our symbols in the statements of the engine's module or class."""
        where, names = self._where(scope), list(map(symbol_name, ours))
        if None in names:
            raise GraftError(
                f"our {self.path}: `{_first_line(ours[names.index(None)])}` in "
                f"{scope[:-1] or 'the module'} is not a function, class or assignment to one name"
            )
        if twice := {name for name in names if names.count(name) > 1}:
            raise GraftError(f"our {self.path} defines `{scope}{min(twice)}` twice")
        known = {name for name in names if find_binding(body, name, where) is not None}
        for k, (name, statement) in enumerate(zip(names, ours)):
            if name in known:
                at = find_binding(body, name, where)
                body[at] = self._replace(body[at], statement, scope + name)
                continue
            if name not in renamed:
                self.before.setdefault(scope + name, None)
            self._check_new(statement, scope + name)
            if name in renamed:
                at = find_binding(body, renamed[name], where) + 1
            elif scope and not isinstance(statement, Definition):
                at = _after_fields(body)
            else:
                at = self._insertion_index(body, ours, k, known, where, scope)
            body.insert(at, _with_blank_lines(statement, 1 if scope else 2))
        return body

    def _check_new(self, statement: cst.CSTNode, symbol: str) -> None:
        inner = statement.body.body if isinstance(statement, cst.ClassDef) else ()
        if any(symbol_name(s) in (REMOVED, RENAMED) for s in inner):
            raise GraftError(
                f"our {self.path}: `class {symbol}` is new; it has nothing to remove or rename"
            )

    def _insertion_index(
        self, body: list, ours: Sequence, k: int, known: set, where: str, scope: str
    ) -> int:
        """Returns a new symbol's index: after our previous one, else before our next known one."""
        chain = [s for s in ours if not scope or isinstance(s, Definition)]
        k = chain.index(ours[k])
        if k:
            return find_binding(body, symbol_name(chain[k - 1]), where) + 1
        following = (symbol_name(s) for s in chain[1:])
        return next(
            (find_binding(body, name, where) for name in following if name in known), len(body)
        )

    def _replace(self, old: cst.CSTNode, new: cst.CSTNode, symbol: str) -> cst.CSTNode:
        if type(old) is not type(new):
            raise GraftError(
                f"{self.path}: `{symbol}` is a {_kind(old)} in the engine, a {_kind(new)} in ours"
            )
        if not isinstance(old, cst.ClassDef):
            self.before[symbol] = fingerprint(old)
            kept, _ = _split_comments(old.leading_lines)
            _, comments = _split_comments(new.leading_lines)
            return new.with_changes(leading_lines=[*kept, *comments])
        theirs, wanted = (
            " ".join(f"@{code_of(one.decorator)}" for one in node.decorators) for node in (old, new)
        )
        if wanted not in ("", theirs):
            raise GraftError(
                f"{self.path}: `class {symbol}` has `{wanted}` in ours, `{theirs}` in the engine; "
                "an opened class must repeat the engine's decorators, or omit them"
            )
        old = self._with_bases(old, new, symbol)
        scope = f"{symbol}."
        members = _without_docstring(body_statements(new, f"our {self.path}"))
        body = body_statements(old, self._where(""))
        body, members, renamed = self._apply_directives(body, members, scope)
        return old.with_deep_changes(
            old.body, body=self._merge_symbols(body, members, scope, renamed)
        )

    def _with_bases(self, old: cst.ClassDef, new: cst.ClassDef, symbol: str) -> cst.ClassDef:
        """Returns the engine's class with our additional bases before its own."""
        theirs, wanted = bases(old), bases(new)
        added = wanted[: len(wanted) - len(theirs)]
        if not wanted or wanted == theirs:
            return old
        if [*added, *theirs] != wanted or any("=" in base for base in added):
            raise GraftError(
                f"{self.path}: `class {symbol}` has `({', '.join(wanted)})` in ours, "
                f"`({', '.join(theirs)})` in the engine; an opened class must repeat the "
                "engine's bases, with its own before them, or omit them"
            )
        self.before[f"{symbol}.{BASES}"] = fingerprint(bases_statement(old))
        front = cst.parse_statement(f"class C({', '.join(added)}): ...").bases
        comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
        front = [arg.with_changes(comma=comma) for arg in front]
        if not theirs:
            front[-1] = front[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
        return old.with_changes(
            bases=[*front, *old.bases], lpar=cst.LeftParen(), rpar=cst.RightParen()
        )


def _is_name(element: object) -> bool:
    return isinstance(element, str) and element.isidentifier()


def _is_pair(element: object) -> bool:
    return isinstance(element, tuple) and len(element) == 2 and all(map(_is_name, element))


def _without_names(statement: cst.CSTNode, names: set[str]) -> cst.CSTNode | None:
    """Returns the statement without what binds these names; None if nothing is left of it."""
    kept = []
    for node in imports_of(statement):
        aliases = [a for a, bound in imported_bindings(node, "") if names.isdisjoint(bound)]
        if isinstance(node.names, cst.ImportStar) or len(aliases) == len(node.names):
            kept.append(node)
        elif aliases:
            aliases[-1] = aliases[-1].with_changes(comma=node.names[-1].comma)
            kept.append(node.with_changes(names=aliases))
    return statement.with_changes(body=kept) if kept else None


def _without_docstring(body: Sequence) -> list:
    first = body[0] if body else None
    is_docstring = (
        isinstance(first, cst.SimpleStatementLine)
        and isinstance(first.body[0], cst.Expr)
        and isinstance(first.body[0].value, (cst.SimpleString, cst.ConcatenatedString))
    )
    return list(body[1:] if is_docstring else body)


def _after_imports(body: list) -> int:
    """Returns the index after the last import above the first line of code."""
    at = len(body) - len(_without_docstring(body))
    for k in range(at, len(body)):
        if imports_of(body[k]):
            at = k + 1
        elif not is_typing_block(body[k]):
            break
    return at


def _after_fields(body: list) -> int:
    """Returns the index after a class's last assignment, else after its docstring."""
    fields = [k + 1 for k, s in enumerate(body) if symbol_name(s) and not isinstance(s, Definition)]
    return fields[-1] if fields else len(body) - len(_without_docstring(body))


def _split_comments(lines: Sequence[cst.EmptyLine]) -> tuple[list, list]:
    """Splits the lines above a statement into separate ones and the comments that touch it."""
    k = len(lines)
    while k and lines[k - 1].comment:
        k -= 1
    return list(lines[:k]), list(lines[k:])


def _with_blank_lines(statement: cst.CSTNode, blanks: int) -> cst.CSTNode:
    """Puts blank lines above a new definition that has none, as the first in our file or class."""
    lines = statement.leading_lines
    if not isinstance(statement, Definition) or (lines and not lines[0].comment):
        return statement
    return statement.with_changes(leading_lines=[*[BLANK] * blanks, *lines])


def _first_line(statement: cst.CSTNode) -> str:
    """Returns a statement's first line, without comments above it."""
    return code_of(statement.with_changes(leading_lines=())).strip().split("\n")[0]


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _kind(node: cst.CSTNode) -> str:
    return {"FunctionDef": "function", "ClassDef": "class"}.get(type(node).__name__, "constant")
