"""Reads a Python file as a list of named symbols, with LibCST."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal

import libcst as cst

Definition = (cst.FunctionDef, cst.ClassDef)


class GraftError(Exception):
    """Two files cannot be grafted; the text names the file and the symbol."""


@dataclass(frozen=True)
class Binding:
    """How a statement binds a name.

    kind: `symbol`, a statement that defines only this name; `import`; `typing`, an import under
    `if TYPE_CHECKING:`; `guarded`, an import under another `if` that holds only imports; `other`,
    anything else (under `if` or `try`, several targets, ...).
    origin: the dotted name of what an import binds, else "".
    """

    kind: Literal["symbol", "import", "typing", "guarded", "other"]
    origin: str = ""


def code_of(node: cst.CSTNode) -> str:
    return cst.Module([]).code_for_node(node)


@lru_cache(maxsize=256)
def parse(text: bytes, where: str) -> cst.Module:
    """Parses a file, and attaches comments at its top to its first statement.

    where: the file's name in errors. Raises GraftError if LibCST cannot read the file.
    """
    try:
        module = cst.parse_module(text)
    except (cst.ParserSyntaxError, ValueError, LookupError) as error:
        raise GraftError(f"{where} is not Python that LibCST can parse: {error}") from error
    if not module.body:
        return module
    first = module.body[0]
    first = first.with_changes(leading_lines=[*module.header, *first.leading_lines])
    return module.with_changes(header=(), body=[first, *module.body[1:]])


def absolute_module(node: cst.ImportFrom, module: str) -> str:
    """Returns the dotted name of the module that a `from ... import` in `module` names."""
    name = dotted(node.module) if node.module else ""
    if not node.relative:
        return name
    base = module.split(".")[: -len(node.relative)]
    return ".".join([*base, name] if name else base)


def dotted(node: cst.BaseExpression) -> str:
    """Returns `a.b.c` for names and attributes, "" for any other expression."""
    if isinstance(node, cst.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr.value}" if base else ""
    return node.value if isinstance(node, cst.Name) else ""


def imported_bindings(
    node: cst.Import | cst.ImportFrom, module: str
) -> Iterator[tuple[cst.ImportAlias, dict[str, str]]]:
    """Yields each alias of an import with what it binds: {name: origin}.

    `import a.b` binds `a`, and is listed as `a.b`, too; the names of a star import are unknown.
    """
    if isinstance(node, cst.ImportFrom):
        if isinstance(node.names, cst.ImportStar):
            return
        source = absolute_module(node, module)
        for alias in node.names:
            name = alias.evaluated_name
            yield alias, {alias.evaluated_alias or name: f"{source}.{name}"}
        return
    for alias in node.names:
        name = alias.evaluated_name
        root = name.split(".")[0]
        yield alias, {alias.evaluated_alias: name} if alias.asname else {root: root, name: name}


def is_typing_block(statement: cst.CSTNode) -> bool:
    """True for `if TYPE_CHECKING:` without `else`."""
    return (
        isinstance(statement, cst.If)
        and statement.orelse is None
        and dotted(statement.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
    )


def imports_of(statement: cst.CSTNode) -> list[cst.Import | cst.ImportFrom]:
    """Returns the imports of a line that holds only imports, else an empty list."""
    small = statement.body if isinstance(statement, cst.SimpleStatementLine) else ()
    return list(small) if all(isinstance(s, (cst.Import, cst.ImportFrom)) for s in small) else []


def is_guarded_import(statement: cst.CSTNode) -> bool:
    """True for an `if` that holds only imports, without `else`, and not for type checking."""
    return (
        isinstance(statement, cst.If)
        and statement.orelse is None
        and all(map(imports_of, statement.body.body))
        and not is_typing_block(statement)
    )


def symbol_name(statement: cst.CSTNode) -> str | None:
    """Returns the name that the statement defines; None unless it defines exactly one."""
    if isinstance(statement, Definition):
        return statement.name.value
    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
        return None
    small, target = statement.body[0], None
    if isinstance(small, cst.AnnAssign):
        target = small.target
    elif isinstance(small, cst.Assign) and len(small.targets) == 1:
        target = small.targets[0].target
    return target.value if isinstance(target, cst.Name) else None


@cache
def bindings(statement: cst.CSTNode, module: str) -> dict[str, Binding]:
    """Returns every name that a statement binds in its module's or class's body."""
    if name := symbol_name(statement):
        return {name: Binding("symbol")}
    if isinstance(statement, cst.SimpleStatementLine):
        kind = "import"
    elif is_guarded_import(statement):
        kind = "guarded"
    else:
        kind = "typing" if is_typing_block(statement) else "other"
    collector = _Collector(kind, module)
    statement.visit(collector)
    return collector.found


class _Collector(cst.CSTVisitor):
    """Collects names that a compound statement or a line binds, but not inside inner scopes."""

    def __init__(self, kind: str, module: str):
        super().__init__()
        self.found: dict[str, Binding] = {}
        self.kind, self.module = kind, module

    def _import(self, node: cst.Import | cst.ImportFrom) -> bool:
        for _, names in imported_bindings(node, self.module):
            for name, origin in names.items():
                again = name in self.found and self.found[name].origin != origin
                self.found[name] = Binding("other") if again else Binding(self.kind, origin)
        return False

    visit_Import = visit_ImportFrom = _import

    def _definition(self, node: cst.FunctionDef | cst.ClassDef) -> bool:
        self.found[node.name.value] = Binding("other")
        return False

    visit_FunctionDef = visit_ClassDef = _definition

    def _target(self, node: cst.CSTNode) -> None:
        target = node.name if isinstance(node, cst.AsName) else node.target
        for name in _target_names(target):
            self.found[name] = Binding("other")

    visit_AssignTarget = visit_AnnAssign = visit_AugAssign = visit_For = visit_NamedExpr = _target
    visit_AsName = _target

    def _skip_scope(self, node: cst.CSTNode) -> bool:
        return False

    visit_Lambda = visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = (
        _skip_scope
    )


def _target_names(target: cst.BaseExpression) -> Iterator[str]:
    if isinstance(target, cst.Name):
        yield target.value
    elif isinstance(target, (cst.Tuple, cst.List)):
        for element in target.elements:
            yield from _target_names(element.value)


_BINDING_TEXTS = {
    "symbol": "a definition",
    "import": "an import",
    "typing": "an import",
    "guarded": "an import under `if`",
    "other": "part of another statement (`if`, `try`, ...)",
}


def find_binding(
    body: Iterable[cst.CSTNode], name: str, where: str, kinds: Iterable[str] = ("symbol",)
) -> int | None:
    """Returns the index of the only statement in `body` that binds `name`; None if unbound.

    kinds: the kinds of Binding to accept. Raises GraftError for two bindings, or another kind.
    """
    found = [
        (at, bound[name].kind) for at, s in enumerate(body) if name in (bound := bindings(s, ""))
    ]
    if not found:
        return None
    if len(found) > 1:
        raise GraftError(
            f"{where}: `{name}` is defined {len(found)} times; only whole symbols can be replaced"
        )
    at, kind = found[0]
    if kind not in kinds:
        what = "a definition" if "symbol" in kinds else "an import"
        raise GraftError(
            f"{where}: `{name}` is bound by {_BINDING_TEXTS[kind]}; only {what} of its own can be "
            "replaced"
        )
    return at


def body_statements(node: cst.Module | cst.ClassDef, where: str) -> list[cst.CSTNode]:
    """Returns a module's or class's statements. Raises GraftError for a body on one line."""
    if isinstance(node, cst.Module):
        return list(node.body)
    if not isinstance(node.body, cst.IndentedBlock):
        raise GraftError(
            f"{where}: `class {node.name.value}` has its body on one line and cannot be opened"
        )
    return list(node.body.body)


BASES = "__bases__"  # in a dotted symbol, the bases and keywords of a class


def bases(node: cst.ClassDef) -> list[str]:
    """Returns the bases and keywords of a class, each without spaces."""
    even = {"comma": cst.MaybeSentinel.DEFAULT, "whitespace_after_arg": cst.SimpleWhitespace("")}
    args = (arg.with_changes(**even) for arg in (*node.bases, *node.keywords))
    return ["".join(code_of(arg).split()) for arg in args]


def bases_statement(node: cst.ClassDef) -> cst.CSTNode:
    """Returns a statement that represents the bases of a class, for its fingerprint."""
    return cst.parse_statement(f"bases({', '.join(bases(node))})")


def lookup(module: cst.Module, symbol: str, where: str) -> cst.CSTNode | None:
    """Returns the statement of a dotted symbol (`Class.method`), None if absent.

    For an imported name this is the import, or the `if` that guards it; for the bases of a class
    (`Class.__bases__`), the one from `bases_statement`. Raises as `find_binding`.
    """
    node: cst.CSTNode = module
    for name in symbol.split("."):
        if name == BASES and isinstance(node, cst.ClassDef):
            return bases_statement(node)
        if not isinstance(node, (cst.Module, cst.ClassDef)):
            return None
        body = body_statements(node, where)
        at = find_binding(body, name, where, ("symbol", "import", "guarded"))
        if at is None:
            return None
        node = body[at]
    return node


@cache
def fingerprint(node: cst.CSTNode | None) -> str | None:
    """Returns SHA-256 (hex) of a symbol with decorators, without indentation or comments above."""
    if node is None:
        return None
    return hashlib.sha256(code_of(node.with_changes(leading_lines=())).encode()).hexdigest()
