"""The rules of a log's reading, for the paste box of the site."""

from typing import Any

from torchclinic.errors import asking, cases, finding, roots
from torchclinic.errors.entries import KINDS, catalogue, page
from torchclinic.errors.squeezing import COLOUR, ENVIRONMENT, LOGS, PREFIX, QUOTES
from torchclinic.errors.telling import OF_TORCHRUN
from torchclinic.process_group import PEER_IS_GONE


def questions() -> dict:
    """All that the paste box needs to find what `asking.nearest` and `asking.decides` find."""
    documents = []
    for address, (asked, text) in asking.documents().items():
        twins = sorted(asking.twins(address) & asking.documents().keys())
        words = [" ".join(words) for words in asked]
        documents.append([address, asking.weight_of(address), words, " ".join(text), twins])
    silent = page("logs")["silent"]
    others, denied = asking.others(), asking.DENIED
    found = {"documents": documents, "others": others, "silent": silent, "denied": denied}
    return {**found, "kinds": [(kind, *of) for kind, of in asking.kinds().items()]}


def rules() -> dict:
    """All that the paste box needs to find what `find` finds, for JSON."""
    rules: dict[str, Any] = {"gap": finding.GAP, "near": finding.NEAR, "kinds": KINDS}
    rules |= {"prose": finding.PROSE, "quoted": finding.QUOTED, "has": finding.HAS}
    rules |= {"named": finding.NAMED, "denied": finding.DENIED}
    rules |= {"colour": COLOUR, "prefix": PREFIX, "environment": ENVIRONMENT, "quotes": QUOTES}
    rules |= {**page("other_programs"), "signs": LOGS["signs"], "harmless": LOGS["harmless"]}
    rules |= {"failure": roots.FAILURE, "frame": roots.FRAME, "others_files": roots.OF_OTHERS}
    rules |= {"gone": PEER_IS_GONE.pattern, "telling": roots.TELLING}
    rules["of_torchrun"] = OF_TORCHRUN
    rules |= {"counted": cases.COUNTED, "measured": cases.MEASURED, "units": cases.UNITS}
    rules["around"] = cases.NEARBY
    rules["errors"] = [
        {"id": e.id, "kind": e.kind, "over": e.over, "patterns": finding.patterns_of(e.id)}
        | {"unless": finding.patterns_of(e.id, "unless"), "cases": cases.cases_of(e)}
        for e in catalogue().values()
    ]
    return rules
