"""What ``make weekly`` has found, as Markdown: which versions are new, and what failed.

Run it with the Python of the environment that was tested.
"""

import re
import sys
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "_build" / "reports"
LONGEST = 4000  # characters of one failure, so that many fit: GitHub takes 1 MiB of a summary


def normal(name: str) -> str:
    """A package's name as PyPI compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def new_versions(constraints: str, installed: dict[str, str]) -> list[tuple[str, str, str]]:
    """Name, version in `constraints`, installed version, of packages whose versions differ."""
    tested = dict(re.findall(r"^([\w.-]+)==(\S+)$", constraints, re.MULTILINE))
    tested = {normal(name): version for name, version in tested.items()}
    rows = ((name, tested.get(name, "none"), version) for name, version in installed.items())
    return sorted(row for row in rows if row[1] != row[2] and row[0] != "torchladder")


def failures(path: Path) -> list[tuple[str, str]]:
    """Where and what, of each failure in a report that pytest wrote; nbval says both outputs."""
    found = []
    for case in ElementTree.parse(path).iter("testcase"):
        for failed in (*case.iter("failure"), *case.iter("error")):
            text = re.sub(r"#x1B\[[\d;]*m", "", failed.text or failed.get("message", ""))
            found.append((f"{case.get('classname')}: {case.get('name')}", text.strip()))
    return found


def section(title: str, path: Path) -> list[str]:
    if not path.exists():
        return [f"## {title}", "", "These tests did not run to their end. The log says why."]
    found = failures(path)
    lines = [f"## {title}", "", f"{len(found)} failed." if found else "None failed."]
    for where, text in found:
        shown = text if len(text) <= LONGEST else f"{text[:LONGEST]}\n... (cut here)"
        lines += ["", f"### {where}", "", "``````text", shown, "``````"]
    return lines


def report(constraints: str, installed: dict[str, str], reports: Path) -> str:
    rows = new_versions(constraints, installed)
    lines = ["# The newest version of everything", "", f"Python {sys.version.split()[0]}.", ""]
    lines += ["## Versions that differ from constraints.txt", "", "None." if not rows else ""]
    if rows:
        lines += ["| package | tested together | here |", "| --- | --- | --- |"]
        lines += [f"| {name} | {tested} | {here} |" for name, tested, here in rows]
    lines += ["", *section("Outputs of notebooks", reports / "notebooks.xml")]
    for part in ("package", "site", "tools"):
        lines += ["", *section(f"Tests of the {part}", reports / f"{part}.xml")]
    return "\n".join(lines)


if __name__ == "__main__":
    found = {normal(d.name): d.version for d in metadata.distributions()}
    print(report((ROOT / "constraints.txt").read_text(encoding="utf-8"), found, REPORTS))
