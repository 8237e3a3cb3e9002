"""Judge the exercises in a file of Python: for a grader, without a notebook and without network.

``python -m torchexercises answers.py average_gradients --json`` ends with 0 if all that is named
is right, else with 1. Without names it judges every exercise that the file defines.
"""

import argparse
import inspect
import json
import runpy
import sys

import torchexercises as check


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m torchexercises", description=__doc__)
    parser.add_argument("file", help="defines functions by the names of the exercises")
    parser.add_argument("names", nargs="*", metavar="name", help="default: all that it defines")
    parser.add_argument("--json", action="store_true", help="name, right, said: one line of JSON")
    options = parser.parse_args()
    wanted = {name: getattr(check, name) for name in options.names}
    written = runpy.run_path(options.file)
    known = {name: known for name, known in check.all_exercises().items() if name in written}
    verdicts = {}
    for name, judged in (wanted or known).items():
        answers = map(written.get, inspect.signature(judged.cases).parameters)
        verdicts[name] = judged.judge(*answers)
    if options.json:
        print(json.dumps({name: {"right": r, "said": s} for name, (r, s) in verdicts.items()}))
    else:
        print(*(f"{name}: {said}" for name, (_, said) in verdicts.items()), sep="\n")
    return 0 if verdicts and all(right for right, _ in verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
