"""The calculators' formulas for the page: the package's own, translated when the site is built.

They are plain arithmetic, and `js` knows no more of Python than they need; anything else is a
KeyError and ends the build. Only docstrings and checks of what is given are left out.
"""

import ast
import inspect
import json
from functools import partial
from pathlib import Path

from torchclinic import will_it_fit

FILE = "estimating.js"
CHECK = "_check"
NUMBERS = ("STATES", "CONTEXT", "RESERVED", "FREE")
MATH = {"max": "Math.max", "min": "Math.min", "int": "Math.trunc"}
FORMS = {
    ast.Attribute: "{value}.{attr}", ast.Subscript: "{value}[{slice}]",
    ast.keyword: "{arg}: {value}",
    ast.Starred: "...{value}", ast.UnaryOp: "{op}{operand}", ast.BinOp: "({left} {op} {right})",
    ast.IfExp: "({test} ? {body} : {orelse})", ast.If: "if ({test}) {body} else {orelse}",
    ast.AugAssign: "{target} {op}= {value};", ast.Return: "return {value};",
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**", ast.Not: "!",
    ast.And: " && ", ast.Or: " || ", ast.Lt: "<", ast.Gt: ">", ast.Eq: "===", ast.Is: "===",
}  # fmt: skip
TREE = ast.parse(inspect.getsource(will_it_fit)).body
FUNCTIONS = [each for each in TREE if isinstance(each, ast.FunctionDef) and each.name != CHECK]
CLASSES = {each.name: each for each in TREE if isinstance(each, ast.ClassDef)}
KNOWN = {*NUMBERS, *MATH, *CLASSES, "PRECISIONS", *(each.name for each in FUNCTIONS)}


lines = "\n".join


def js(node, known=KNOWN) -> str:
    """`known`: the names that may be used here."""
    inner = partial(js, known=known)
    match node:
        case str():
            return node
        case list():
            return f"{{\n{lines(map(inner, node))}\n}}"
        case ast.Name(name) if name in known:
            return MATH.get(name, name)
        case ast.Name(name):
            raise KeyError(name)
        case ast.Constant(value):
            return json.dumps(value)
        case ast.Tuple(items):
            return f"[{', '.join(map(inner, items))}]"
        case ast.BoolOp(sign, values):
            return f"({js(sign).join(map(inner, values))})"
        case ast.Compare(left, [ast.In()], [right]):
            return f"{inner(right)}.includes({inner(left)})"
        case ast.Compare(left, [sign], [right]):
            return f"({inner(left)} {js(sign)} {inner(right)})"
        case ast.Call(ast.Name(name), given, []) if name not in CLASSES:
            return f"{inner(node.func)}({', '.join(map(inner, given))})"
        case ast.Call(ast.Name(name), [], given) if name in CLASSES:
            return f"{name}({{{', '.join(map(inner, given))}}})"
        case ast.Expr(ast.Constant(str())):
            return ""
        case ast.Expr(ast.Call(ast.Name(name))) if name == CHECK:
            return ""
        case ast.If(body=[ast.Raise()], orelse=[]):
            return ""
        case ast.Assign(targets, value):
            return f"{' = '.join(map(inner, [*targets, value]))};"
        case ast.FunctionDef(
            name,
            ast.arguments([], given, None, options, usual, None, []),
            decorator_list=[] | [ast.Name("property")],
        ):
            parts = list(ast.walk(node))
            takes = {each.arg for each in given + options}
            names = [each for each in parts if isinstance(each, ast.Name)]
            own = {each.id for each in names if isinstance(each.ctx, ast.Store)} - takes
            functions = {each.name for each in parts if isinstance(each, ast.FunctionDef)}
            let = f"let {', '.join(sorted(own))};" if own else ""
            told = [
                f"{each.arg} = {inner(value)}" if value else each.arg
                for each, value in zip(options, usual, strict=True)
            ]
            head = ", ".join([each.arg for each in given] + [f"{{{', '.join(told)}}} = {{}}"])
            body = js(node.body, known | takes | own | functions)
            return f"function {name}({head}) {{ {let} {body} }}"
    form = FORMS[type(node)]
    return form.format_map(
        {name: inner(part) for name, part in ast.iter_fields(node) if name in form}
    )


def script() -> str:
    """``estimating`` has each function of the package, and its ``PRECISIONS``."""
    numbers = {name: getattr(will_it_fit, name) for name in NUMBERS}
    numbers["PRECISIONS"] = {name: of._asdict() for name, of in will_it_fit.PRECISIONS.items()}
    parts = [f"const {name} = {json.dumps(value)};" for name, value in numbers.items()]
    for name, kind in CLASSES.items():
        properties = [each for each in kind.body if isinstance(each, ast.FunctionDef)]
        more = "".join(f", {each.name}: ({js(each)})(self)" for each in properties)
        parts.append(f"const {name} = (self) => ({{...self{more}}});")
    parts += map(js, FUNCTIONS)
    names = ", ".join(["PRECISIONS", *(each.name for each in FUNCTIONS)])
    return f"const estimating = (() => {{\n{lines(parts)}\nreturn {{{names}}};\n}})();\n"


def write_script(app, env):
    if any(FILE in metadata.get("files", "") for metadata in env.metadata.values()):
        folder = Path(app.outdir, "_static")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).write_text(script(), "utf-8")


def setup(app):
    app.connect("env-updated", write_script)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
