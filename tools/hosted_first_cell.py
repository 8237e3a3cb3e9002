# ruff: noqa: E401, I001
# Run this cell first. It unpacks the book's packages, carried in the one long line at the end,
# where Python finds them, and says what this session has and what it lacks.
import base64, io, os, sys, tarfile, tempfile


def set_up(carried, **chapter):
    if "hosted_session" not in sys.modules:  # this cell runs for the first time
        folder = tempfile.mkdtemp(prefix="torchladder-")
        with tarfile.open(fileobj=io.BytesIO(base64.b85decode(carried))) as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # none before 3.11.4
            archive.extractall(folder)
        sys.path.insert(0, folder)  # for this notebook, and for the processes it starts:
        os.environ["PYTHONPATH"] = f"{folder}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    import hosted_session

    hosted_session.check_session(**chapter)


set_up(carried="")
