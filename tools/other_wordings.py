"""Print texts of the installed PyTorch that are like a pattern of the catalogue, and not found.

    .venv/bin/python tools/other_wordings.py

It takes minutes: all texts are read, in the compiled libraries and in the Python files. A later
version may word an error otherwise, and so may the code of a device that this machine lacks. Most
of what is printed is another error; whoever reads it decides which texts become patterns.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from difflib import SequenceMatcher
from pathlib import Path

import torch

from torchclinic import errors

WORD = re.compile(r"[A-Za-z_]\w{1,40}")
ALIKE = 0.7  # of their words, in their order
USUAL = 60  # patterns with a word that says nothing


def texts_of(package: Path) -> Iterator[str]:
    """What a package's libraries and Python files may print, with a * for what is filled in."""
    for path in sorted(package.rglob("*.so")):
        for found in re.finditer(rb"[\n -~]{20,500}", path.read_bytes()):
            yield found[0].decode()
    for path in sorted(package.rglob("*.py")):
        with suppress(SyntaxError):  # of a newer Python
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.JoinedStr):
                    parts = node.values
                    yield "".join(v.value if isinstance(v, ast.Constant) else "*" for v in parts)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value[:500]


def main() -> None:
    patterns = [(e.id, p, WORD.findall(p)) for e in errors.catalogue().values() for p in e.patterns]
    having = defaultdict(list)
    for number, (*_, words) in enumerate(patterns):
        for word in set(words):
            having[word].append(number)
    pieces = [piece for name in errors.catalogue() for p in errors._patterns(name) for piece in p]
    known = "\n".join(pieces)
    for text in dict.fromkeys(texts_of(Path(torch.__file__).parent)):
        said = WORD.findall(text)
        telling = [word for word in set(said) if len(having.get(word, ())) < USUAL]
        near = Counter(number for word in telling for number in having.get(word, ()))
        for number, shared in near.most_common(3):
            name, pattern, words = patterns[number]
            if shared < 2 or SequenceMatcher(None, words, said).ratio() < ALIKE:
                continue
            # Part of a pattern, or found by one.
            if "".join(errors._squeeze(text)).strip("*") not in known and not errors.find(text):
                print(f"{name}: {pattern}\n    {' '.join(text.split())}", flush=True)
                break


if __name__ == "__main__":
    main()
