"""``torchclinic explain``: a log or an entry's id in; why, and what to do, out."""

import io
import os
import re
import subprocess
import sys
import time
from email.message import Message
from types import SimpleNamespace
from unittest import mock

import pytest

from torchclinic import cli, errors
from torchclinic.errors import catalogue

LOG = """loading epoch_3.pt
RuntimeError: Error(s) in loading state_dict for Linear:
\tMissing key(s) in state_dict: "weight", "bias".
\tUnexpected key(s) in state_dict: "module.weight", "module.bias".
"""


def run(*arguments, **options):
    command = [sys.executable, "-m", "torchclinic", "explain", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, timeout=120, **options)


@pytest.fixture
def explain(capsys, monkeypatch):
    """Exit status and what is printed, in this process; a terminal unless there is `given`."""

    def answer(*arguments, given=None):
        stdin = SimpleNamespace(isatty=lambda: given is None, buffer=io.BytesIO(given or b""))
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys.stdout, "reconfigure", lambda **_: None, raising=False)
        with pytest.raises(SystemExit) as ended:
            cli.main(["explain", *map(str, arguments)])
        return ended.value.code, *capsys.readouterr()

    return answer


def test_a_log_in_a_file_is_explained(explain, tmp_path):
    path = tmp_path / "log.txt"
    path.write_text(LOG)
    status, out, err = explain(path)
    assert (status, err) == (0, "")
    entry = catalogue()["module-prefix"]
    assert out.startswith("module-prefix: ")
    assert "line 4: Unexpected key(s) in state_dict" in out
    assert "Why: " in out
    assert "Do: " in out
    assert " ".join(entry.fix.split())[:20] in " ".join(out.split())
    assert out.endswith("torchclinic explain module-prefix\n")


@pytest.mark.parametrize("arguments", [(), ("-",)])
def test_a_log_is_read_from_the_standard_input(explain, arguments):
    status, out, _ = explain(*arguments, given=LOG.encode())
    assert status == 0
    assert out.startswith("module-prefix: ")


def test_an_unknown_error_has_the_status_1(explain):
    status, out, err = explain(given=b"KeyError: 'rank'\n")
    assert (status, err) == (1, "")
    assert out.startswith("No entry of the catalogue has these words.")


@pytest.mark.parametrize(
    ("arguments", "given", "sentence"),
    [
        (["module-prefx"], b"", "is called module-prefx. The nearest entries: module-prefix"),
        (["no/such.log"], b"", "no file and no entry is called no/such.log"),
        ([], None, "give a FILE with a log, pipe one in, or name an entry"),
        ([], b"\n \n", "add 2>&1"),
        (["."], b"", "Is a directory"),
        (["/dev/full"], b"", "/dev/full is a device"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_sentence_and_the_status_2(explain, arguments, given, sentence):
    status, out, err = explain(*arguments, given=given)
    assert (status, out) == (2, "")
    assert err.startswith("torchclinic explain: ")
    assert sentence in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["random.pt", "an_archive"])
def test_a_file_of_weights_is_for_another_command(explain, tmp_path, name):
    (tmp_path / "random.pt").write_bytes(os.urandom(1000))
    (tmp_path / "an_archive").write_bytes(b"PK\x03\x04 and so on")
    status, _, err = explain(tmp_path / name)
    assert status == 2
    assert err.endswith(f"torchclinic inspect {tmp_path / name}\n")


@pytest.mark.parametrize("name", catalogue())
def test_an_entry_is_printed_whole_and_fits_a_terminal(explain, name):
    status, out, _ = explain(name, given=b"")
    assert status == 0
    entry = catalogue()[name]
    for text in (entry.fails, entry.works, entry.quoted):
        assert all(line.strip() in out for line in text.splitlines())
    # Code and addresses are not wrapped.
    prose = re.sub(r"(?m)^    .*|\S*[/.]\S*", "", out)
    assert max(map(len, prose.splitlines())) <= 100
    assert "](" not in re.sub(r"(?m)^    .*", "", out)
    assert "\x1b" not in out


def test_all_causes_of_a_log_are_named_with_their_lines(explain):
    log = LOG + "\nIndexError: Target 10 is out of bounds.\n"
    _, out, _ = explain(given=log.encode())
    assert "Also in your log:\n  line 6, target-out-of-bounds: " in out


@pytest.mark.parametrize(
    "log",
    {
        "UTF-16 of Windows PowerShell": LOG.encode("utf-16"),
        "UTF-16 without its mark": LOG.encode("utf-16-le"),
        "UTF-16, the other order": b"\xfe\xff" + LOG.encode("utf-16-be"),
        "a mark of UTF-8": b"\xef\xbb\xbf" + LOG.encode(),
        "latin-1": b"d\xe9but \xff\xfe\n" + LOG.encode(),
        "GBK": "训练报错\n".encode("gbk") + LOG.encode(),
        "NUL bytes": LOG.encode().replace(b"\n", b"\0\0\n"),
        "cut in a character": LOG.encode() + "训".encode()[:2],
        "an odd number of bytes in UTF-16": LOG.encode("utf-16") + b"x",
    }.items(),
    ids=lambda item: item[0],
)
def test_a_log_in_any_encoding_is_read(explain, log):
    status, out, _ = explain("-", given=log[1])
    assert status == 0
    assert out.startswith("module-prefix: ")


@pytest.mark.slow
def test_five_megabytes_are_explained_without_importing_torch(tmp_path):
    path = tmp_path / "log.txt"
    path.write_text("epoch 1: loss 0.523, test 81.20%, 12,345 images/s\n" * 100_000 + LOG)
    start = time.monotonic()
    done = run(path, env=os.environ | {"PYTHONPROFILEIMPORTTIME": "1"})
    assert time.monotonic() - start < 10  # on a quiet machine, less than 1
    assert done.returncode == 0
    assert done.stdout.startswith(b"module-prefix: ")
    imported = set(re.findall(r"\| +(\w+)$", done.stderr.decode(), re.MULTILINE))
    assert "torchladder" in imported
    assert not imported & {"torch", "numpy", "matplotlib", "IPython"}


@pytest.mark.slow
def test_a_terminal_that_lacks_a_character_gets_another(tmp_path):
    path = tmp_path / "log.txt"
    path.write_text('训练 Unexpected key(s) in state_dict: "module.weight".\n', encoding="utf-8")
    done = run(path, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert b"?? Unexpected key(s)" in done.stdout


def published(*urls):
    found = Message()
    for url in urls:
        found["Project-URL"] = url
    return mock.patch("torchclinic.errors.metadata", return_value=found)


def test_links_lead_to_the_published_book_if_the_package_says_where_it_is(tmp_path):
    entry = errors.catalogue()["port-in-use"]
    address = "https://a.example/book/notebooks/errors_ranks.html#port-in-use"
    with published("Repository, https://b.example", "Documentation, https://a.example/book/"):
        text = errors._in_a_terminal(entry)
        with mock.patch.object(errors, "NOTEBOOKS", tmp_path / "gone"):
            assert address in errors.of_chapter("09")._repr_markdown_()
    assert address in text
    assert "https://a.example/book/notebooks/09_rung_4_distributed.html#the-port-is-in-use" in text
    with published("Documentation, https://a.example"):
        assert errors._published("01_tensors_on_disk") == (
            "https://a.example/notebooks/01_tensors_on_disk.html"
        )


@pytest.mark.parametrize("urls", [(), ("Repository, https://b.example",)])
def test_without_a_published_book_links_name_the_notebooks(urls):
    with published(*urls):
        text = errors._in_a_terminal(errors.catalogue()["port-in-use"])
    assert "\n    errors_ranks#port-in-use\n    09_rung_4_distributed#" in text
