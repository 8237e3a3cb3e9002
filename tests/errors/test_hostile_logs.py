"""No text makes the search slow: the time grows as the text does, whatever it holds."""

import random
import string
import time

import pytest

from torchclinic.errors import _squeezed_patterns, catalogue, find, nearest, squeeze

pytestmark = pytest.mark.slow
SIZES = [1_000_000, pytest.param(5_000_000, marks=pytest.mark.long)]  # characters


def first_pieces():
    return [p[0].decode() for name in catalogue() for p in _squeezed_patterns(name) if len(p) > 1]


def begun(gap):
    """All patterns, each without its last piece: what is looked for longest and never found."""
    patterns = [p for name in catalogue() for p in _squeezed_patterns(name)]
    return gap.join(b"".join(p[:-1] or [p[0][:-1]]).decode() for p in patterns) + gap


letters = random.Random(0).choices(string.printable, k=100_000)
HOSTILE = {
    "one letter": "a",
    "line ends": "\n",
    "blanks": " ",
    "tabs and line ends": "\t\n",
    "quotation marks": "'\"`",
    "quotations": "> > > ",
    "a line of quotations": "> > > > > > > >\n",
    "dashes": "- - - ",
    "colours": "\x1b[31m",
    "colours that do not end": "\x1b[",
    "a colour that does not end": "\x1b[" + "1;" * 5_000_000,
    "colours in text": "\\u001b[",
    "brackets": "[",
    "timestamps": "2026-03-07T10:02:04.123456789 ",
    "the first pieces": "".join(first_pieces()),
    "patterns without their ends": begun(""),
    "patterns without their ends, apart": begun(" " * 50),
    "printable text": "".join(letters),
    "Chinese": "训练报错，怎么办？",
    "carriage returns": "10%|##  |\r",
    "names": "word" * 100 + "|",
}


def seconds(text):
    start = time.process_time()
    find(text)
    nearest(text)
    return time.process_time() - start


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("piece", HOSTILE.values(), ids=HOSTILE)
def test_hostile_text_takes_seconds_at_most_and_ten_times_as_much_of_it_no_more_than_its_share(
    piece, size
):
    text = piece * (size // len(piece) + 1)
    find("")  # reads the catalogue
    tenth, whole = seconds(text[: size // 10]), seconds(text[:size])
    assert whole < size / 250_000  # seen: up to 5 s for 5 MB on a busy machine
    assert whole < 20 * max(tenth, 0.02)


GAPPED = [name for name in catalogue() if any(len(p) > 1 for p in _squeezed_patterns(name))]

# Each of them takes as long as the next: a sample in `make test`, all in `make test-long`.
SAMPLED = [
    name if number % 6 == 0 else pytest.param(name, marks=pytest.mark.long)
    for number, name in enumerate(GAPPED)
]


@pytest.mark.parametrize("name", SAMPLED)
def test_the_beginning_of_a_pattern_again_and_again_is_no_slower(name):
    for pattern in _squeezed_patterns(name):
        if len(pattern) > 1:
            for piece in (pattern[0], b"".join(pattern[:-1])):
                assert seconds(piece.decode() * (50_000 // len(piece))) < 2


def test_a_log_of_five_megabytes_is_read_in_time():
    line = "2026-03-07 10:02:{:02d},{:03d} - trainer - INFO - epoch {} step {}: loss {:.4f}, {} s\n"
    log = "".join(
        line.format(i % 60, i % 1000, i // 100, i, 2 / (i + 1), i * 7 % 9999) for i in range(70_000)
    )[:5_000_000]
    log += 'RuntimeError: Unexpected key(s) in state_dict: "module.weight".\n'
    assert seconds(log) < 10
    assert find(log)[0].line == len(squeeze(log)) - 1
