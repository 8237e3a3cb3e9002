"""The calculators' formulas for the page: the package's own, translated when the site is built.

They are plain arithmetic, and `js` knows no more of Python than they need; a test holds what it
writes against the package. Only docstrings and checks of what is given are left out.
"""

import ast
import inspect
import json
from pathlib import Path

from torchclinic import will_it_fit

FILE = "estimating.js"
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
FUNCTIONS = [each for each in TREE if isinstance(each, ast.FunctionDef) and each.name != "_check"]
CLASSES = {each.name: each for each in TREE if isinstance(each, ast.ClassDef)}
lines = "\n".join


def js(node) -> str:
    match node:
        case str():
            return node
        case list():
            return f"{{\n{lines(map(js, node))}\n}}"
        case ast.Name(name):
            return MATH.get(name, name)
        case ast.Constant(value):
            return json.dumps(value)
        case ast.Tuple(items):
            return f"[{', '.join(map(js, items))}]"
        case ast.BoolOp(sign, values):
            return f"({js(sign).join(map(js, values))})"
        case ast.Compare(left, [ast.In()], [right]):
            return f"{js(right)}.includes({js(left)})"
        case ast.Compare(left, [sign], [right]):
            return f"({js(left)} {js(sign)} {js(right)})"
        case ast.Call(ast.Name(name), [], given) if name in CLASSES:
            return f"{name}({{{', '.join(map(js, given))}}})"
        case ast.Call(ast.Name() as function, given, []):
            return f"{js(function)}({', '.join(map(js, given))})"
        case ast.Expr(ast.Constant(str()) | ast.Call(ast.Name("_check"))):
            return ""
        case ast.If(body=[ast.Raise()], orelse=[]):
            return ""
        case ast.Assign(targets, value):
            return f"{' = '.join(map(js, [*targets, value]))};"
        case ast.FunctionDef(name, ast.arguments(args=given, kwonlyargs=options)):
            takes = {each.arg for each in given + options}
            names = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
            own = {each.id for each in names if isinstance(each.ctx, ast.Store)} - takes
            let = f"let {', '.join(sorted(own))};" if own else ""
            told = [
                f"{each.arg} = {js(value)}" if value else each.arg
                for each, value in zip(options, node.args.kw_defaults, strict=True)
            ]
            head = ", ".join([each.arg for each in given] + [f"{{{', '.join(told)}}} = {{}}"])
            return f"function {name}({head}) {{ {let} {js(node.body)} }}"
    form = FORMS[type(node)]
    return form.format_map({name: js(part) for name, part in ast.iter_fields(node) if name in form})


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
