"""The mutants of a module: a copy of its syntax tree with one thing changed, by operators that are the usual ones.

No library: a comparison's boundary or direction, + for -, * for /, ``and`` for ``or``, a condition negated, a ``not``
or a minus dropped, a number plus 1 (a large one doubled), True for False, min for max, any for all, the first two
arguments swapped, ``return None``, and a call, an assignment to an attribute or an item, a ``raise``, a ``break``
removed. No docstring, annotation, decorator, other text, or argument of an error is touched.
"""

import ast
import collections
import copy

SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
DIRECTIONS = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


class Mutations(ast.NodeVisitor):
    """Collects ``(node, text before, text after)`` of all mutants of a module."""

    def __init__(self) -> None:
        self.found: list[tuple[ast.AST, str, str]] = []

    def _add(self, node: ast.AST, instead: ast.AST | str) -> None:
        after = instead if isinstance(instead, str) else ast.unparse(ast.fix_missing_locations(instead))
        if isinstance(node, ast.expr) and not isinstance(node, (ast.Constant, ast.Call, ast.Name)):
            after = f"({after})"
        self.found.append((node, ast.unparse(node), after))

    def _changed(self, node: ast.AST, **fields: object) -> None:
        changed = copy.deepcopy(node)
        for name, value in fields.items():
            setattr(changed, name, value)
        self._add(node, changed)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for part in (*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body):
            self.visit(part)

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for part in node.body:
            self.visit(part)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """A text."""

    def visit_Raise(self, node: ast.Raise) -> None:
        self._add(node, "pass")

    visit_Break = visit_Continue = visit_Delete = visit_Raise  # type: ignore[assignment]

    def visit_Assert(self, node: ast.Assert) -> None:
        self.visit(node.test)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self._add(node, "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if isinstance(node.targets[0], (ast.Attribute, ast.Subscript)):
            self._add(node, "pass")
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add(node, "pass")
        if type(node.op) in SWAPS:
            self._changed(node, op=SWAPS[type(node.op)]())
        self.visit(node.value)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and ast.unparse(node.value) != "None":
            self._changed(node, value=ast.Constant(None))
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for place, operator in enumerate(node.ops):
            for table in (SWAPS, DIRECTIONS):
                if type(operator) in table:
                    self._changed(node, ops=[*node.ops[:place], table[type(operator)](), *node.ops[place + 1 :]])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in SWAPS:
            self._changed(node, op=SWAPS[type(node.op)]())
        self.generic_visit(node)

    visit_BoolOp = visit_BinOp  # type: ignore[assignment]

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        self._add(node, node.operand)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add(node, str(not node.value))
        elif isinstance(node.value, (int, float)):
            self._add(node, repr(node.value + 1 if abs(node.value) < 100 else 2 * node.value))

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in NAMES:
            self._changed(node, func=ast.Name(NAMES[node.func.id]))
        if len(node.args) > 1 and ast.dump(node.args[0]) != ast.dump(node.args[1]):
            self._changed(node, args=[node.args[1], node.args[0], *node.args[2:]])
        self.generic_visit(node)

    def visit_If(self, node: ast.If | ast.IfExp | ast.While) -> None:
        if ast.unparse(node.test) != "TYPE_CHECKING":
            self._add(node.test, f"not ({ast.unparse(node.test)})")
            self.generic_visit(node)

    visit_IfExp = visit_While = visit_If  # type: ignore[assignment]


def mutants_of(source: str) -> dict[int, list[tuple[str, str, str]]]:
    """The mutants of a module by line: what it says, what it would, and the whole module then."""
    visitor, data = Mutations(), source.encode()
    visitor.visit(ast.parse(source))
    begins = [0]
    for line in data.split(b"\n"):
        begins.append(begins[-1] + len(line) + 1)
    found: dict[int, list[tuple[str, str, str]]] = collections.defaultdict(list)
    for node, before, after in visitor.found:
        begin = begins[node.lineno - 1] + node.col_offset
        end = begins[node.end_lineno - 1] + node.end_col_offset
        found[node.lineno].append((before, after, (data[:begin] + after.encode() + data[end:]).decode()))
    return found
