"""From a log to its cause: the catalogue of errors, and the rules that recognise them.

``catalogue/`` holds the entries: what each error says, why it happens, what to do, and the code
that shows both. The error clinic's notebooks are written from it, ``torchclinic explain`` prints
it, and the paste box of the site applies the same rules (`rules`) in the browser.

`entries` reads the catalogue, `squeezing` a log, `finding` brings them together, `cases` chooses
what to do, `asking` knows what people say they see, `telling` says what was found, `tracebacks`
under an error, `terminal` lays a text out, and `for_the_box` has the rules that the site reads.
"""

from torchclinic.errors.entries import Error, ErrorTable, catalogue, of_chapter, page
from torchclinic.errors.finding import Match, find, other_program
from torchclinic.errors.for_the_box import questions, rules
from torchclinic.errors.telling import as_json, explain
from torchclinic.errors.tracebacks import note

__all__ = [
    "Error",
    "ErrorTable",
    "Match",
    "as_json",
    "catalogue",
    "explain",
    "find",
    "note",
    "of_chapter",
    "other_program",
    "page",
    "questions",
    "rules",
]
