"""The calculators' formulas for the page: the package's own, translated when the site is built.

They are plain arithmetic, and `js` knows no more of Python than they need; anything else is a
KeyError and ends the build.
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
    ast.Name: "{id}", ast.Attribute: "{value}.{attr}", ast.Subscript: "{value}[{slice}]",
    ast.Starred: "...{value}", ast.UnaryOp: "{op}{operand}", ast.BinOp: "({left} {op} {right})",
    ast.IfExp: "({test} ? {body} : {orelse})", ast.If: "if ({test}) {body} else {orelse}",
    ast.AugAssign: "{target} {op}= {value};", ast.Return: "return {value};",
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**", ast.Not: "!",
    ast.And: " && ", ast.Or: " || ", ast.Lt: "<", ast.Gt: ">", ast.Eq: "===", ast.Is: "===",
}  # fmt: skip


lines = "\n".join


def js(node) -> str:
    match node:
        case str():
            return node
        case list():
            return f"{{\n{lines(map(js, node))}\n}}"
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
        case ast.Call(ast.Name(name), given, []):
            return f"{MATH.get(name, name)}({', '.join(map(js, given))})"
        case ast.Call(name, [], given):
            return f"{js(name)}({{{', '.join(f'{each.arg}: {js(each.value)}' for each in given)}}})"
        case ast.Expr() | ast.If(body=[ast.Raise()]):  # a docstring, a check of what is given
            return ""
        case ast.Assign(targets, value):
            return f"{' = '.join(map(js, [*targets, value]))};"
        case ast.FunctionDef(name, ast.arguments(args=given, kwonlyargs=options)):
            known = {each.arg for each in given + options}
            names = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
            own = {each.id for each in names if isinstance(each.ctx, ast.Store)} - known
            let = f"let {', '.join(sorted(own))};" if own else ""
            defaults = zip(options, node.args.kw_defaults, strict=True)
            told = [f"{each.arg} = {js(usual)}" if usual else each.arg for each, usual in defaults]
            takes = ", ".join([each.arg for each in given] + [f"{{{', '.join(told)}}} = {{}}"])
            return f"function {name}({takes}) {{ {let} {js(node.body)} }}"
    form = FORMS[type(node)]
    return form.format_map({name: js(part) for name, part in ast.iter_fields(node) if name in form})


def script() -> str:
    """``estimating`` has each function of the package, and its ``PRECISIONS``."""
    numbers = {name: getattr(will_it_fit, name) for name in NUMBERS}
    numbers["PRECISIONS"] = {name: of._asdict() for name, of in will_it_fit.PRECISIONS.items()}
    parts = [f"const {name} = {json.dumps(value)};" for name, value in numbers.items()]
    tree = ast.parse(inspect.getsource(will_it_fit)).body
    functions = [each for each in tree if isinstance(each, ast.FunctionDef)][:-1]  # then `_check`
    for kind in (each for each in tree if isinstance(each, ast.ClassDef)):
        properties = [each for each in kind.body if isinstance(each, ast.FunctionDef)]
        more = "".join(f", {each.name}: ({js(each)})(self)" for each in properties)
        parts.append(f"const {kind.name} = (self) => ({{...self{more}}});")
    parts += map(js, functions)
    names = ", ".join(["PRECISIONS", *(each.name for each in functions)])
    return f"const estimating = (() => {{\n{lines(parts)}\nreturn {{{names}}};\n}})();\n"


def write_script(app, env):
    if any(FILE in metadata.get("files", "") for metadata in env.metadata.values()):
        folder = Path(app.outdir, "_static")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).write_text(script(), "utf-8")


def setup(app):
    app.connect("env-updated", write_script)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
