"""Code, outputs and diffs as a page shows them; the notebooks stay as they are."""

import re
from typing import ClassVar

from docutils import nodes
from pygments.lexer import RegexLexer, bygroups, inherit, using
from pygments.lexers.diff import DiffLexer
from pygments.lexers.python import PythonLexer
from pygments.token import Comment, Generic, Name, Number, Text

TRACEBACK = r"Traceback \(most recent call last\)"
WIDEST = 110  # letters in a line of columns; a longer one is a sentence


class TracebackLexer(RegexLexer):
    """An error of a cell. Its message is text: neither its words nor its quotes are Python.

    IPython's own lexer colours messages and heads as Python; that of Pygments knows only the
    format of the interpreter.
    """

    name = "IPython error"
    aliases = ("ipython-error",)
    tokens: ClassVar = {
        "root": [
            (rf"([\w.]+)( +{TRACEBACK}\n)", bygroups(Name.Exception, Comment)),
            (r"(-+> )(\d+)([^\n]*\n)", bygroups(Name.Exception, Number, using(PythonLexer))),
            (r"( +\d+)([^\n]*\n)", bygroups(Comment, using(PythonLexer))),
            (
                r"(\S[^\n]*?)(, line )(\d+)(, in )?([^\n]*\n)",
                bygroups(Name.Namespace, Text, Number, Text, Name.Function),
            ),
            (r"^[A-Za-z_][\w.]*(?=:|\n)", Name.Exception, "message"),
            (r"[^\n]*\n", Text),
        ],
        "message": [
            (rf"(?=^[\w.]+ +{TRACEBACK}\n)", Text, "#pop"),
            (rf"^(?:Original )?{TRACEBACK}:\n", Comment),
            (
                r'^( +(?:File )?)("[^"\n]+"|[A-Z]\w+ cell)(, line )(\d+)(, in )([^\n]+\n)',
                bygroups(Text, Name.Namespace, Text, Number, Text, Name.Function),
            ),
            (r"^[\w.]*(?:Error|Exception)(?=: )", Name.Exception),
            (r"[^\n]*\n", Generic.Output),  # wraps, where frames of code do not
        ],
    }


class LinesLexer(DiffLexer):
    """A line that stays is an element, too: all of them wrap by the same rule."""

    tokens: ClassVar = {"root": [(r"( .*)(\n)", bygroups(Generic.Output, Text)), inherit]}


def write(block, text):
    block.rawsource, block[:] = text, [nodes.Text(text)]


def name_cells(app, doctree):
    """A traceback cites cells by numbers, which a page does not show; and it needs no rule."""
    for cell in doctree.findall(lambda node: "exec_count" in getattr(node, "attributes", ())):
        for block in cell.findall(nodes.literal_block):
            if "output" in block["classes"]:
                text = block.astext().replace(f"Cell In[{cell['exec_count']}]", "This cell")
                text = re.sub(r"Cell In\[\d+\]", "An earlier cell", text)
                write(block, re.sub(r"^-{75}\n(\w+) +(?=Traceback)", r"\1  ", text, flags=re.M))


def keep_columns(app, doctree):
    """What stands in columns scrolls sideways where there is no room; sentences wrap."""
    for block in doctree.findall(nodes.literal_block):
        lines = block.astext().splitlines()
        is_code = "ipython" in block.get("language", "")
        in_columns = any(re.search(r"\S {2,}\S", line) for line in lines)
        if in_columns and not is_code and max(map(len, lines)) < WIDEST:
            block["classes"].append("columns")


def name_folds_and_options(app, page, template, context, doctree):
    if doctree:
        # What stands on a fold is its name, rather than "Toggle hidden content" for all of them.
        body = re.sub(r'<summary aria-label="[^"]*">', "<summary>", context["body"])
        # A fold that shows the solution hides the solution.
        shows = r'(<p class="collapsed [\w-]+">Show ([^<:]*).*\n<p class="expanded [\w-]+">)[^<]*'
        body = re.sub(shows, r"\1Hide \2", body)
        if re.match(r"notebooks/\d", page):  # what only a notebook needs is not copied, as a prompt
            magic = (
                r'<pre><span></span><span class="o">(?:(!)</span>|(%%writefile)</span>( [^\n]*\n))'
            )
            body = re.sub(magic, r'<pre><span class="gp">\1\2\3</span>', body)
        # A line of text ends before ``--standalone``, not after its hyphens.
        option = r'<span class="pre">(?=-[\w=-]{1,24}</span>)'
        context["body"] = re.sub(option, '<span class="pre option">', body)


def shorten_diffs(app, doctree):
    """A diff's head names the files as the repository does; docstrings are no part of it."""
    for block in doctree.findall(nodes.literal_block):
        if block.get("language") in ("diff", "udiff"):  # of a cell, of a literalinclude
            block["language"] = "udiff"
            head, *hunks = re.split(r"^(?=@@ )", block.astext(), flags=re.M)
            hunks = [hunk for hunk in hunks if not of_docstring(hunk)]
            write(block, "".join([head.replace(f"{app.srcdir}/", ""), *hunks]))


def of_docstring(hunk):
    """Whether all that changes is the text that opens a program."""
    return re.match(r'@@ -1[, ].*\n-"""', hunk) and not re.search(
        r"^[-+](import|from) ", hunk, re.M
    )


def setup(app):
    app.add_lexer("ipython-error", TracebackLexer)
    app.add_lexer("udiff", LinesLexer)
    for change in (name_cells, shorten_diffs, keep_columns):
        app.connect("doctree-read", change)
    app.connect("html-page-context", name_folds_and_options)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
