"""Read a pickle without doing what it says.

A pickle is a program: it may import any name and call it. `pickletools` decodes its steps. The
machine here follows them, and puts a `StandIn` wherever something would be imported, called or
built. It cannot import, and it calls nothing that the file names.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any, BinaryIO


class StandIn(dict):
    """What a pickle wanted to import, or what a call of it would have made; inert.

    As a dict it holds the entries that the pickle put in: a subclass of dict is still readable.

    Attributes
    ----------
    name : str
        What was to be imported, ``"argparse.Namespace"``.
    args : tuple or None
        What it was to be called with; None if it was only imported.
    state : object
        What its attributes were to be: of most classes, the dict of them.
    """

    def __init__(self, name: str, args: tuple | None = None) -> None:
        self.name, self.args, self.state = name, args, None

    def __repr__(self) -> str:
        return f"<{self.name}>"

    __hash__ = object.__hash__  # it may be a key
    __eq__ = object.__eq__


# Made for real: they are in nearly every file, and making them does nothing else.
PLAIN: dict[str, Callable] = {
    "collections.OrderedDict": dict,
    "collections.defaultdict": lambda *factory: {},
    "builtins.dict": dict,
    "builtins.list": list,
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "builtins.complex": complex,
    "torch.Size": tuple,
    "_codecs.encode": lambda text, encoding: text.encode("latin1"),  # how bytes are pickled
}


def read_pickle(
    file: BinaryIO,
    make: Callable[[str, tuple], Any] = StandIn,
    kept_outside: Callable[[Any], Any] = lambda tag: tag,
) -> Any:
    """The object that the pickle at `file`'s position describes, with stand-ins in it.

    Parameters
    ----------
    file : binary file
        Is left at the byte after the pickle.
    make : callable
        Gives the stand-in for a call, from the name that is called and the arguments.
    kept_outside : callable
        Gives what stands for an object outside the pickle (a storage), from its tag.

    Raises
    ------
    Exception
        Of any kind, if the pickle is damaged: a stack that is empty, a key that is a list.

    Examples
    --------
    >>> import argparse, io, pickle
    >>> settings = {"lr": 0.1, "args": argparse.Namespace(epochs=3)}
    >>> found = read_pickle(io.BytesIO(pickle.dumps(settings)))
    >>> found, found["args"].state
    ({'lr': 0.1, 'args': <argparse.Namespace>}, {'epochs': 3})
    """
    machine = _Machine(make, kept_outside)
    for opcode, value, _ in pickletools.genops(file):
        if opcode.name == "STOP":
            return machine.stack.pop()
        machine.step(opcode.name, value)
    raise EOFError("the pickle has no end")


class _Machine:
    """A pickle's stack and memory. (The standard library's own can be used up by one wrong
    memory index, and gives attributes of the file's choice to real classes.)"""

    def __init__(self, make: Callable, kept_outside: Callable) -> None:
        self.make, self.kept_outside = make, kept_outside
        self.stack, self.marked, self.memo = [], [], {}

    def to_mark(self) -> list:
        items, self.stack = self.stack, self.marked.pop()
        return items

    def call(self, called: StandIn, args: tuple) -> Any:
        name = called.name.replace("__builtin__.", "builtins.")  # Python 2's name for it
        return PLAIN[name](*args) if name in PLAIN else self.make(name, args)

    def step(self, name: str, value: Any) -> None:
        """Everything but plain containers: names, calls, the stack and the memory."""
        push, pop = self.stack.append, self.stack.pop
        match name:
            case "GLOBAL":
                push(StandIn(value.replace(" ", ".", 1)))
            case "STACK_GLOBAL":
                name, module = pop(), pop()
                push(StandIn(f"{module}.{name}"))
            case "REDUCE" | "NEWOBJ":
                args = pop()
                push(self.call(pop(), args))
            case "NEWOBJ_EX":
                keywords, args = pop(), pop()
                push(self.call(pop(), (*args, keywords)))
            case "OBJ":
                called, *args = self.to_mark()
                self.stack.append(self.call(called, tuple(args)))
            case "INST":
                args = tuple(self.to_mark())
                self.stack.append(self.call(StandIn(value.replace(" ", ".", 1)), args))
            case "BUILD":
                state = pop()
                if isinstance(self.stack[-1], StandIn):
                    self.stack[-1].state = state
            case "PERSID" | "BINPERSID":
                push(self.kept_outside(value if name == "PERSID" else pop()))
            case "MARK":
                self.marked.append(self.stack)
                self.stack = []
            case "POP_MARK":
                self.to_mark()
            case "POP":
                pop() if self.stack else self.to_mark()
            case "DUP":
                push(self.stack[-1])
            case "PUT" | "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
                self.memo[len(self.memo) if value is None else value] = self.stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                push(self.memo[value])
            case "PROTO" | "FRAME":
                pass
            case _:
                self.plain_step(name, value)

    def plain_step(self, name: str, value: Any) -> None:
        """Make or fill a container, or push a number or a string."""
        push, pop = self.stack.append, self.stack.pop
        match name:
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                push({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
            case "EMPTY_DICT" | "EMPTY_LIST" | "EMPTY_TUPLE" | "EMPTY_SET":
                push({"DICT": dict, "LIST": list, "TUPLE": tuple, "SET": set}[name[6:]]())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                items = [pop() for _ in range(int(name[-1]))]
                push(tuple(reversed(items)))
            case "TUPLE" | "LIST" | "FROZENSET":
                items = self.to_mark()
                make = {"TUPLE": tuple, "LIST": list, "FROZENSET": frozenset}[name]
                self.stack.append(make(items))
            case "APPEND" | "APPENDS":
                items = [pop()] if name == "APPEND" else self.to_mark()
                if isinstance(self.stack[-1], list):
                    self.stack[-1].extend(items)
            case "SETITEM":
                last = pop()
                first = pop()
                self.stack[-1][first] = last
            case "SETITEMS" | "DICT":
                items = self.to_mark()
                if name == "DICT":
                    self.stack.append({})
                self.stack[-1].update(zip(items[::2], items[1::2], strict=True))
            case "ADDITEMS":
                items = self.to_mark()
                self.stack[-1].update(items)
            case _ if value is not None:
                push(value)
            case _:
                raise ValueError(f"the step {name}")
