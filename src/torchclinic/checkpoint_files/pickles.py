"""Unpickle without doing what the pickle says.

A pickle is a program: it may import any name and call it. ``torch.load`` takes a module in place of
`pickle`; `InertPickle` is one. It makes containers, numbers and plain tensors, and puts a `StandIn`
wherever anything else would be imported, called or built. It imports nothing that a file names.
"""

import math
import pickle
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch._weights_only_unpickler import _get_allowed_globals

# What calls and imports may make, in items or letters: so many, and one for each byte read. Of
# what an honest program wrote, each is in the file.
FREE = 10_000
BRANCHES = (dict, list, tuple, set, frozenset)
STORAGES = (torch.TypedStorage, torch.UntypedStorage)


class StandIn(dict):
    """What a pickle wanted to import, or what calling it would have made; inert.

    As a dict it holds the items that the pickle set: a subclass of dict is still readable.
    """

    __slots__ = ("args", "name", "state")  # a file may want millions

    def __init__(self, name: str, args: tuple | None = None) -> None:
        self.name = name  # what was to be imported: "argparse.Namespace"
        self.args = args  # what it was to be called with; None if it was only imported
        self.state: Any = None  # what its attributes were to be: of most classes, a dict

    def __repr__(self) -> str:
        return f"<{self.name}>"

    __hash__: Any = object.__hash__  # it may be a key
    __eq__ = object.__eq__

    def append(self, *items: Any) -> None:
        """Ignore what would be added to a subclass of list."""

    extend = append


class InertPickle:
    """Takes the place of the module `pickle` in ``torch.load``, and keeps notes.

    Attributes
    ----------
    imports : dict of str to None
        What the file would import that ``weights_only=True`` does not allow, in order.
    storages : dict of int to (str, str, int)
        By `storage_id`: a storage's key in the file, the device it was saved from, its bytes.
    classes : dict of str to None
        Of tensors that are made plain ones, without what else such a class holds.

    Examples
    --------
    >>> import argparse, io
    >>> settings = {"lr": 0.1, "args": argparse.Namespace(epochs=3)}
    >>> inert = InertPickle()
    >>> found = inert.load(io.BytesIO(pickle.dumps(settings)))
    >>> found, found["args"].state, list(inert.imports)
    ({'lr': 0.1, 'args': <argparse.Namespace>}, {'epochs': 3}, ['argparse.Namespace'])
    """

    __name__ = "torchclinic.checkpoint_files.pickles"  # torch.load asks for it

    def __init__(self) -> None:
        self.imports: dict[str, None] = {}
        self.classes: dict[str, None] = {}
        self.storages: dict[int, tuple[str, str, int]] = {}
        self.Unpickler = type("Unpickler", (_InertUnpickler,), {"notes": self})

    def load(self, file: Any, **options: Any) -> Any:
        """The object that the pickle at `file`'s position describes."""
        found = self.Unpickler(file, **options).load()
        # torch.load, alone, has options. Of a legacy file it reads a number, a number, a dict and,
        # after the tensors, a list of the storages that it fills; another would keep whatever
        # was in memory.
        if options and (self.storages or not isinstance(found, int | dict)):
            keys = {key for key, *_ in self.storages.values()}
            if not all(isinstance(key, str) for key in found) or set(found) != keys:
                raise pickle.UnpicklingError("storages are used that the file does not list")
        return found


def walk(tree: Any) -> Iterator[tuple[str, Any]]:
    """Each tensor, storage and container in a tree, after the dotted keys that lead to it."""
    waiting, opened, kinds = [("", tree)], set(), (*BRANCHES, *STORAGES, torch.Tensor)
    while waiting:
        name, value = waiting.pop()
        yield name.removeprefix("."), value
        if isinstance(value, BRANCHES) and id(value) not in opened:
            opened.add(id(value))  # a file may hold a list that holds itself
            inside: Iterable[tuple[Any, Any]] = enumerate(value)
            if isinstance(value, dict):  # its keys may be stand-ins
                inside = [*value.items(), *inside, *getattr(value, "__dict__", {}).items()]
            if isinstance(value, StandIn):
                inside = [*inside, ("state", value.state), ("args", value.args)]
            found = [(k, v) for k, v in inside if isinstance(v, kinds)]
            waiting += [(f"{name[:200]}.{str(k)[:200]}", v) for k, v in reversed(found)]


def storage_id(tensor: torch.Tensor) -> int:
    """Equal for tensors that share a storage."""
    return tensor.untyped_storage()._cdata


def _key(key: Any) -> Any:
    """What stands for a key: others than these may be made to take for ever to look up."""
    is_plain = isinstance(key, str) or (isinstance(key, int) and key.bit_length() <= 64)
    return key if is_plain else StandIn(type(key).__name__)


def _dict(pairs: Iterable = (), kind: type[dict] = dict) -> dict:
    return kind((_key(pair[0]), pair[1]) for pair in pairs)


def _set(items: Iterable = ()) -> set:
    return set(map(_key, items))


def _tensor(storage, offset, size, stride, requires_grad=False, hooks=None, metadata=None):
    dtype = getattr(storage, "dtype", None)
    return _tensor_of_dtype(storage, offset, size, stride, 0, 0, dtype, metadata)


def _tensor_of_dtype(storage, offset, size, stride, grad, hooks, dtype, metadata=None):
    """The tensor, without gradient and hooks, if its numbers are all in the storage."""
    if isinstance(storage, StandIn):  # as pickle.dump writes them: each a file of torch.save
        return StandIn(f"torch._utils._rebuild_tensor of {storage.name}")
    if str(dtype).startswith(("torch.qint", "torch.quint")):  # torch crashes on some such
        return StandIn("torch._utils._rebuild_qtensor")
    if metadata:  # bits that torch believes: on some dtypes, they can end the process
        return StandIn("torch._utils._rebuild_conjugate_or_negative")
    if max(len(size), len(stride)) > 64:  # PyTorch's own limit, which it does not keep here
        raise pickle.UnpicklingError(f"a tensor of {len(size)} dimensions")
    if not all(type(n) is int and 0 <= n < 2**63 for n in (offset, *size, *stride)):
        raise pickle.UnpicklingError(f"a tensor of shape {size}, stride {stride}")
    last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    needs = (offset + last + 1) * dtype.itemsize if all(size) else 0
    there = storage._untyped_storage.nbytes()
    # Else torch might make the storage larger, or count beyond 64 bits.
    if needs > there or overflows(size, dtype):
        raise pickle.UnpicklingError(f"a tensor of shape {size} in {there} bytes")
    if dtype == torch.complex128 and storage._untyped_storage.data_ptr() % 16:
        raise pickle.UnpicklingError(f"{dtype} numbers do not begin where the processor needs it")
    return torch._utils._rebuild_tensor_v3(storage, offset, size, stride, False, None, dtype)


def overflows(shape: Iterable[int], dtype: torch.dtype) -> bool:
    """Whether PyTorch cannot count such a tensor's numbers, even where it has none."""
    return math.prod(n or 1 for n in shape) * dtype.itemsize >= 2**63


# Called for real: they are in nearly every file, and do nothing but build.
CALLED = {
    "collections.OrderedDict": lambda pairs=(): _dict(pairs, OrderedDict),
    "builtins.dict": _dict,
    "builtins.list": list,
    "builtins.set": _set,
    "builtins.complex": complex,
    "torch.Size": torch.Size,
    "torch.device": torch.device,
    "_codecs.encode": lambda text, encoding: text.encode("latin1"),  # how bytes are pickled
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
}


class _InertUnpickler(pickle._Unpickler):
    """The standard library's unpickler in Python, with all steps replaced that import or call.

    Its memo is a dict: the one written in C can be made to allocate 64 GB by one wrong index.
    """

    notes: InertPickle
    made = 0.0
    stack: list[Any]  # this and the next three are the base's own
    append: Callable[[Any], None]
    pop_mark: Callable[[], list]
    load_binbytes8: Callable[[], None]
    dispatch: ClassVar[dict[int, Callable]] = dict(pickle._Unpickler.dispatch)
    for step in (pickle.DICT, pickle.INST, pickle.OBJ):  # of protocols that torch does not write
        del dispatch[step[0]]

    def __init__(self, file: Any, **options: Any) -> None:
        super().__init__(file, **options)
        self.position = file.tell

    def spend(self, count: float) -> None:
        """Count what is made: by naming one thing again and again, a small file makes much."""
        self.made += count
        if self.made > FREE + self.position():
            raise pickle.UnpicklingError("it makes far more than it holds")

    def find_class(self, module: str, name: str) -> Any:
        # By protocol 2, things are called as in Python 2: __builtin__.xrange.
        names = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        self.spend(len(names[0]) + len(names[1]))
        name = ".".join(names)
        allowed = _get_allowed_globals()
        if isinstance(allowed.get(name), torch.dtype) or name == "torch.storage.UntypedStorage":
            return allowed[name]
        if name not in allowed:
            self.notes.imports[name] = None
        return StandIn(name)

    def call(self, function: StandIn, args: tuple) -> Any:
        self.spend(tuple.__len__(args))  # which refuses what is no tuple
        inner = None
        if function.name.startswith("torch._utils._rebuild_parameter"):
            inner = args[0]
        elif function.name == "torch._tensor._rebuild_from_type_v2":  # a subclass, or attributes
            inner = self.call(args[0], args[2])
            if (kind := getattr(args[1], "name", "")) in self.notes.imports:
                self.notes.classes[kind] = None
        elif function.name in CALLED:
            if not function.name.startswith("torch._utils."):  # those copy nothing
                sized = [a for a in args if hasattr(a, "__len__")]
                # The items of a tensor or storage would be objects that are not in the file.
                is_read = all(isinstance(a, (*BRANCHES, str, bytes)) for a in sized)
                self.spend(sum(map(len, sized)) if is_read else math.inf)
            return CALLED[function.name](*args)
        return inner if isinstance(inner, torch.Tensor) else StandIn(function.name, args)

    def load_call(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = self.call(self.stack[-1], args)

    def load_newobj_ex(self) -> None:
        self.stack.pop()  # keywords, which nothing has that is called
        self.load_call()

    def load_build(self) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], StandIn):
            self.stack[-1].state = state
        elif isinstance(self.stack[-1], OrderedDict) and isinstance(state, dict):
            notes = state.get("_metadata")  # of a state dict, on the versions of the modules
            if isinstance(notes, dict):
                self.stack[-1].__dict__["_metadata"] = notes

    def load_bytearray8(self) -> None:
        self.load_binbytes8()  # pickle's own step fills as much memory as the file claims
        self.append(self.call(StandIn("builtins.bytearray"), (self.stack.pop(),)))

    def load_binpersid(self) -> None:
        """Have torch find a storage, and note where in the file it is and where it was."""
        kind, *about = self.stack.pop()
        if kind == "module":  # a class, with its source text
            return self.append(about[0])
        storage_type, key, device, count, *view = about
        if not (isinstance(key, str) and isinstance(device, str) and type(count) is int):
            raise pickle.UnpicklingError("a storage without a key, a device and a size")
        if any(view):
            raise pickle.UnpicklingError("a view of a storage, as torch 0.1 wrote them")
        storage = self.persistent_load((kind, storage_type, key, device, count, *view))
        bytes_ = storage._untyped_storage
        self.notes.storages[bytes_._cdata] = key, device, bytes_.nbytes()
        self.append(storage)

    def set_items(self, items: list) -> None:
        """Into a dict; a tensor may show 4 bytes for ever."""
        if not isinstance(self.stack[-1], dict):
            raise pickle.UnpicklingError("an item set in what is no dict")
        self.stack[-1].update(zip(map(_key, items[::2]), items[1::2], strict=True))

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.set_items([key, value])

    def load_setitems(self) -> None:
        self.set_items(self.pop_mark())

    def load_additems(self) -> None:
        items = _set(self.pop_mark())  # which changes the stack
        self.stack[-1].update(items)

    def load_frozenset(self) -> None:
        items = StandIn("frozenset", (_set(self.pop_mark()),))  # weights_only=True has none
        self.append(items)

    dispatch |= {
        pickle.REDUCE[0]: load_call,
        pickle.NEWOBJ[0]: load_call,
        pickle.NEWOBJ_EX[0]: load_newobj_ex,
        pickle.BUILD[0]: load_build,
        pickle.BYTEARRAY8[0]: load_bytearray8,
        pickle.BINPERSID[0]: load_binpersid,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.ADDITEMS[0]: load_additems,
        pickle.FROZENSET[0]: load_frozenset,
    }
