"""Calls between two sandboxed processes: the judge, which runs tests, and the program that they test.

Sent as text to both (`sandbox_child`), so it imports the standard library only. The judge never runs code of the
program: arguments and results are data, which each side builds again from JSON (`_Codec`), so that an object of the
program with a false `__eq__` has no say in a comparison. An object without such a form stays in its process, and the
other side has a stand-in for it: the judge a `Remote`, which asks the program for attributes, items and calls; the
program a function, for a function of the tests.

A line is `{"do": operation, "args": ...}`, or the answer to the last such line: `{"value"}` or `{"error"}`. Containers
among the arguments that were changed by a call are changed on the other side, too. A message of the program has what it
has `printed` since the last one, for tests that capture it.
"""

from __future__ import annotations

import ast
import base64
import builtins
import collections
import datetime as dt
import decimal
import fractions
import importlib
import io
import json
import operator
import os
import symtable
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

_SIMPLE: dict[type, Callable[[Any], Any]] = {str: str.__str__, int: int.__int__, float: float.__float__}
_ALIASES = {"np": "numpy"}
_PRINTED_BYTES = 1 << 20
_NUMPY_KINDS = "biufcSUmM"
_SAFE_BUILTINS = {
    *(abs, all, any, bool, chr, dict, divmod, float, frozenset, hash, int, len, list, max, min, ord, pow, range),
    *(reversed, round, set, sorted, str, sum, tuple),
}
"""Builtins that a test may give to the program; with others, such as getattr, it could take the judge over."""


class UnsupportedTests(BaseException):
    """The tests need what two processes cannot do. Not an Exception: no `except` of the tests may take it for one."""


class Remote:
    """An object of the program's; every question about it is answered there, except comparisons."""

    __slots__ = ("_handle", "_kind", "_peer")

    def __init__(self, peer: Peer, handle: int, kind: str) -> None:
        """Stand for the object `handle` of another process; `kind` is its type's name."""
        for name, value in (("_peer", peer), ("_handle", handle), ("_kind", kind)):
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return self._peer.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("setattr", self, name, value)

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Have the program call the object."""
        return self._peer.ask("call", self, *args, **named)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, Remote) and self._peer.ask("isinstance", instance, self) is True

    def __mro_entries__(self, bases: Any) -> Any:
        raise UnsupportedTests("the tests derive a class from one of the program's")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedTests(f"the tests copy or pickle an object of the program's class {self._kind}")

    def __hash__(self) -> int:
        return hash(self._handle)

    def __repr__(self) -> str:
        return str(self._peer.ask("repr", self))

    def __str__(self) -> str:
        return str(self._peer.ask("str", self))

    def __contains__(self, item: Any) -> bool:
        return any(item is one or item == one for one in iter(self))

    def _compare(self, other: Any) -> Any:
        # The program must not decide whether its answer is the expected one.
        if isinstance(other, Remote) and self is not other:
            raise UnsupportedTests(
                f"the tests compare two objects of the program's own classes ({self._kind}): compare their attributes"
            )
        return NotImplemented

    def _calculate(self, name: str, *operands: Any) -> Any:
        result = self._peer.ask(name, *operands)
        if not all(isinstance(one, Remote) for one in operands):
            # An object could answer any difference from the expected number with 0.
            raise UnsupportedTests(f"the tests calculate with an object of the program's own class {self._kind}")
        return result

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _compare


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "getattr": getattr,
    "setattr": setattr,
    "call": lambda function, *args, **named: function(*args, **named),
    "isinstance": isinstance,
    "repr": repr,
    "str": str,
    "await": lambda coroutine: importlib.import_module("asyncio").run(coroutine),
}


def _add_operators() -> None:
    def asks(name: str) -> Callable[..., Any]:
        return lambda self, *args: self._peer.ask(name, self, *args)

    def calculates(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
        return (
            lambda self, other: self._calculate(name, self, other),
            lambda self, other: self._calculate(name, other, self),
        )

    unary: dict[str, Callable[..., Any]] = {
        "len": len,
        "iter": iter,
        "next": next,
        "int": int,
        "float": float,
        "bool": bool,
        "abs": abs,
    }
    unary |= {name: getattr(operator, name) for name in ("index", "neg", "pos", "invert")}
    binary = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"]
    binary += ["lshift", "rshift"]
    for name, function in unary.items():
        _OPERATIONS[name] = function
        setattr(Remote, f"__{name}__", asks(name))
    for name in ("getitem", "setitem", "delitem"):
        _OPERATIONS[name] = getattr(operator, name)
        setattr(Remote, f"__{name}__", asks(name))
    for name in binary:
        _OPERATIONS[name] = getattr(operator, f"__{name}__")
        for method, function in zip((f"__{name}__", f"__r{name}__"), calculates(name), strict=True):
            setattr(Remote, method, function)
    _OPERATIONS["enter"] = lambda manager: type(manager).__enter__(manager)
    _OPERATIONS["exit"] = lambda manager, *_: type(manager).__exit__(manager, None, None, None)
    Remote.__enter__ = asks("enter")  # type: ignore[attr-defined]
    Remote.__exit__ = lambda self, *_: bool(self._peer.ask("exit", self))  # type: ignore[attr-defined]


_add_operators()


class Peer:
    """One end of the connection."""

    def __init__(self, connection: BinaryIO, module: dict[str, Any], *, is_judge: bool) -> None:
        """Talk over a connection; `module` is the namespace of the program, or of the tests."""
        sys.set_int_max_str_digits(0)
        self._connection = connection
        self._module = module
        self._is_judge = is_judge
        self._own: list[Any] = []
        """Objects of this process that the other one has stand-ins for."""
        self._handles: dict[int, int] = {}
        self.stand_ins: dict[int, Any] = {}
        self.data: list[str] = []
        """Names of the program's globals that are data: the judge's copies are renewed after each question."""
        self._printed = io.BytesIO()
        self._stdout = io.TextIOWrapper(self._printed, "utf-8", "backslashreplace", write_through=True)

    def ask(self, do: str, *args: Any, **named: Any) -> Any:
        """Have the other process do something, and return or raise what it does."""
        try:
            return self._ask(do, *args, **named)
        finally:
            if self.data:
                self.copy_globals(self.data)

    def copy_globals(self, names: Sequence[str]) -> None:
        """Copy globals of the program into the tests' namespace."""
        answer = self._ask("globals", *names)
        # The program may answer with names that it was not asked for.
        self._module.update({name: answer[name] for name in names if name in answer})

    def _ask(self, do: str, *args: Any, **named: Any) -> Any:
        codec = _Codec(self)
        self._send({"do": do, "args": [codec.encode(one) for one in args], "named": codec.encode(named)})
        containers = list(codec.containers)
        while True:
            message = self._receive()
            if "do" in message:
                self._answer(message)
                continue
            error = self._error(message["error"], codec) if "error" in message else None
            value = None if error else codec.decode(message["value"])
            for container, content in zip(containers, message["state"], strict=False):
                codec.restore(container, content)
            if error:
                raise error
            return value

    def serve(self) -> None:
        """Answer until the other process closes the connection."""
        sys.stdout = self._stdout
        while line := self._connection.readline():
            self._answer(json.loads(line))

    def _answer(self, message: dict[str, Any]) -> None:
        codec = _Codec(self)
        args, named = [codec.decode(one) for one in message["args"]], codec.decode(message["named"])
        containers = list(codec.containers)
        try:
            answer = {"value": codec.encode(self._do(message["do"], args, named))}
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the program may raise anything
            codec.keep(containers)
            answer = {"error": self._described(error, codec)}
        self._send(answer | {"state": [codec.content(one) for one in containers]})

    def _do(self, do: str, args: list[Any], named: dict[str, Any]) -> Any:
        if self._is_judge:
            function = args.pop(0)
            if do != "call" or not may_be_given(function, self._module):
                raise TypeError("a program may only call functions that a test has given to it")
            return function(*args, **named)
        if do == "names":
            return [name for name in args if name in self._module]
        if do == "globals":
            return {name: self._module[name] for name in args if name in self._module}
        return _OPERATIONS[do](*args, **named)

    def _send(self, message: dict[str, Any]) -> None:
        if printed := self._printed.getvalue()[:_PRINTED_BYTES]:
            message["printed"] = printed.decode(errors="backslashreplace")
            self._printed.seek(0)
            self._printed.truncate()
        self._connection.write(json.dumps(message).encode() + b"\n")
        self._connection.flush()

    def _receive(self) -> dict[str, Any]:
        if not (line := self._connection.readline()):
            os._exit(1)  # no `except` of the tests may take it for an error of the program's function
        message: dict[str, Any] = json.loads(line)
        if self._is_judge and "printed" in message and sys.stdout is not sys.__stdout__:  # the tests capture it
            print(str(message["printed"]), end="")
        return message

    def _described(self, error: BaseException, codec: _Codec) -> list[Any]:
        attributes = {name: _text(value) for name, value in vars(error).items()}
        return [codec.encode(type(error)), type(error).__name__, [_text(one) for one in error.args], attributes]

    def _error(self, described: Sequence[Any], codec: _Codec) -> Exception:
        kind, name, args, attributes = described
        found = codec.decode(kind)
        try:
            error = found(*args) if isinstance(found, type) and issubclass(found, Exception) else None
        except TypeError:  # some take certain arguments
            error = None
        if error is None:  # or such as SystemExit
            return RuntimeError(f"{name}: {args}")
        vars(error).update(attributes)
        return error

    def described_object(self, value: Any) -> list[Any]:
        """Return the encoded form of an object without a form as data.

        Raises:
            UnsupportedTests: it is the judge's, and no function that the program may call.

        """
        if isinstance(value, Remote):
            return ["theirs", object.__getattribute__(value, "_handle")]
        if isinstance(value, types.FunctionType) and "_judges_handle" in vars(value):
            return ["theirs", vars(value)["_judges_handle"]]
        is_error = isinstance(value, type) and issubclass(value, BaseException)
        if is_error and value.__module__ == "builtins":
            return ["exception", value.__name__]
        if self._is_judge and not may_be_given(value, self._module):
            if (handle := next((n for n, one in self.stand_ins.items() if one is value), None)) is not None:
                return ["theirs", handle]
            name = getattr(value, "__name__", None) or f"an object of the type {type(value).__name__}"
            raise UnsupportedTests(f"the tests give {name} to the program, which gets plain data and functions only")
        kind = next((kind for kind, known in _KINDS.items() if isinstance(value, known)), "object")
        bases = []
        if is_error and self._is_judge is False:
            kind = "error"
            bases = [self.described_object(base) for base in value.__bases__ if issubclass(base, BaseException)]
        if id(value) not in self._handles:
            self._handles[id(value)] = len(self._own)
            self._own.append(value)  # also keeps its id from being used again
        name = value.__name__ if isinstance(value, type | types.ModuleType) else type(value).__name__
        return ["object", self._handles[id(value)], kind, str(name), bases]

    def own_object(self, handle: int) -> Any:
        """Return the object of this process that the other one has a stand-in for."""
        return self._own[handle]

    def stand_in(self, handle: int, kind: str, name: str, bases: Sequence[Any]) -> Any:
        """Return the stand-in for an object of the other process, always the same one."""
        if handle not in self.stand_ins:
            self.stand_ins[handle] = self._new_stand_in(handle, kind, name, bases)
        return self.stand_ins[handle]

    def _new_stand_in(self, handle: int, kind: str, name: str, bases: Sequence[Any]) -> Any:
        if not self._is_judge:

            def call(*args: Any, **named: Any) -> Any:
                return self.ask("call", call, *args, **named)

            vars(call)["_judges_handle"] = handle
            return call
        if kind == "module" and is_own_module(name):
            return importlib.import_module(name)
        if kind == "error":
            found = [base for base in bases if isinstance(base, type) and issubclass(base, Exception)]
            return type(name, tuple(found) or (Exception,), {"__module__": "program"})
        remote = Remote(self, handle, name)
        if kind == "coroutine":
            return _wait(self, remote)
        return _iterate(self, remote) if kind == "generator" else remote


class _Codec:
    """The values of one request and its answer; a container that occurs twice is the same one on both sides."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self.containers: list[Any] = []
        self._number: dict[int, int] = {}

    def encode(self, value: Any) -> Any:  # noqa: C901, PLR0911, PLR0912 - one case per kind
        """Return a value as JSON: simple ones as they are, others as a list that begins with its kind."""
        if value is None or isinstance(value, bool):
            return value
        for kind, plain in _SIMPLE.items():
            if isinstance(value, kind):
                return plain(value)
        if isinstance(value, tuple):
            items = [self.encode(one) for one in tuple.__iter__(value)]
            fields = getattr(type(value), "_fields", None)
            return ["named", type(value).__name__, list(fields), items] if fields else ["tuple", items]
        if isinstance(value, list | dict | set | bytearray | collections.deque):
            if (number := self._number.get(id(value))) is not None:
                return ["same", number]
            self._add(value)
            return [_kind_of(value), self.content(value)]
        if isinstance(value, frozenset):
            return ["frozenset", [self.encode(one) for one in frozenset.__iter__(value)]]
        if isinstance(value, bytes):
            return ["bytes", base64.b64encode(value).decode()]
        if isinstance(value, complex):
            return ["complex", value.real, value.imag]
        if isinstance(value, range):
            return ["range", value.start, value.stop, value.step]
        if type(value) in (decimal.Decimal, fractions.Fraction):
            return [type(value).__name__, str(value)]
        if type(value) in (dt.datetime, dt.date, dt.time):
            return [type(value).__name__, value.isoformat()]
        if type(value) is dt.timedelta:
            return ["timedelta", value.days, value.seconds, value.microseconds]
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None and type(value) is numpy.ndarray and value.dtype.kind in _NUMPY_KINDS:
            return ["ndarray", value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]
        if numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in _NUMPY_KINDS:
            return ["scalar", value.dtype.str, base64.b64encode(value.tobytes()).decode()]
        return self._peer.described_object(value)

    def content(self, container: Any) -> Any:
        """Return what is in a list, dict, set, deque or bytearray."""
        if isinstance(container, dict):
            return [[self.encode(key), self.encode(value)] for key, value in dict.items(container)]
        if isinstance(container, bytearray):
            return base64.b64encode(container).decode()
        kind: Any = next(kind for kind in (list, set, collections.deque) if isinstance(container, kind))
        return [self.encode(one) for one in kind.__iter__(container)]

    def decode(self, value: Any) -> Any:  # noqa: C901, PLR0911, PLR0912 - one case per kind
        """Return the value that another process has encoded."""
        if not isinstance(value, list):
            return value
        match value:
            case ["same", number]:
                return self.containers[number]
            case ["list" | "dict" | "set" | "bytearray" | "deque" | "Counter" | "OrderedDict" as kind, content]:
                container = _CONTAINERS[kind]()
                self._add(container)
                self.restore(container, content)
                return container
            case ["tuple", items]:
                return tuple(self.decode(one) for one in items)
            case ["named", name, fields, items]:
                return collections.namedtuple(name, fields)(*map(self.decode, items))
            case ["frozenset", items]:
                return frozenset(self.decode(one) for one in items)
            case ["bytes", text]:
                return base64.b64decode(text)
            case ["complex", real, imaginary]:
                return complex(real, imaginary)
            case ["range", start, stop, step]:
                return range(start, stop, step)
            case ["Decimal", text]:
                return decimal.Decimal(text)
            case ["Fraction", text]:
                return fractions.Fraction(text)
            case ["datetime" | "date" | "time" as kind, text]:
                return getattr(dt, kind).fromisoformat(text)
            case ["timedelta", days, seconds, microseconds]:
                return dt.timedelta(days, seconds, microseconds)
            case ["ndarray", dtype, shape, text]:
                numpy = importlib.import_module("numpy")
                kept = numpy.dtype(dtype)
                if kept.kind not in _NUMPY_KINDS:
                    raise TypeError(f"an array of {dtype}")
                return numpy.frombuffer(base64.b64decode(text), kept).reshape(shape).copy()
            case ["scalar", dtype, text]:
                return self.decode(["ndarray", dtype, [], text])[()]
            case ["exception", name]:
                found = getattr(builtins, name)
                return found if isinstance(found, type) and issubclass(found, Exception) else RuntimeError
            case ["theirs", handle]:
                return self._peer.own_object(handle)
            case ["object", handle, kind, name, bases]:
                return self._peer.stand_in(handle, kind, name, [self.decode(base) for base in bases])
        raise TypeError(f"not a value: {value[:1]}")

    def keep(self, containers: Sequence[Any]) -> None:
        """Forget all containers but these, the first ones."""
        self.containers = list(containers)
        self._number = {id(one): number for number, one in enumerate(containers)}

    def restore(self, container: Any, content: Any) -> None:
        """Give a container the content that another process has encoded."""
        if isinstance(container, dict):
            items = [(self.decode(key), self.decode(value)) for key, value in content]
            dict.clear(container)
            for key, value in items:
                dict.__setitem__(container, key, value)
            return
        if isinstance(container, bytearray):
            container[:] = base64.b64decode(content)
            return
        found = [self.decode(one) for one in content]
        container.clear()
        container.update(found) if isinstance(container, set) else container.extend(found)

    def _add(self, container: Any) -> None:
        self._number[id(container)] = len(self.containers)
        self.containers.append(container)


async def _wait(peer: Peer, remote: Remote) -> Any:
    return peer.ask("await", remote)


def _iterate(peer: Peer, remote: Remote) -> Iterator[Any]:
    while True:
        try:
            item = peer.ask("next", remote)
        except StopIteration:
            return
        yield item


_KINDS: dict[str, type] = {
    "module": types.ModuleType,
    "coroutine": types.CoroutineType,
    "generator": types.GeneratorType,
}
"""Objects with a stand-in of their own."""
_CONTAINERS: dict[str, type] = {
    **{kind.__name__: kind for kind in (list, dict, set, bytearray)},
    **{kind.__name__: kind for kind in (collections.deque, collections.Counter, collections.OrderedDict)},
}


def _kind_of(container: Any) -> str:
    kinds = (collections.Counter, collections.OrderedDict, list, dict, set, bytearray, collections.deque)
    return next(kind.__name__ for kind in kinds if isinstance(container, kind))


def _text(value: Any) -> Any:
    return value if value is None or type(value) in (bool, int, float, str) else str(value)


def may_be_given(value: Any, module: dict[str, Any]) -> bool:
    """Return True if a program may call a function of the judge: the tests' own, and harmless ones of Python."""
    while isinstance(value, types.MethodType):
        value = value.__func__
    if isinstance(value, types.FunctionType):
        return value.__globals__ is module
    try:
        return value in _SAFE_BUILTINS or getattr(value, "__module__", None) in ("_operator", "math")
    except TypeError:  # not hashable
        return False


def is_own_module(name: str) -> bool:
    """Return True if the judge imports a module itself instead of asking the program for it."""
    return name.partition(".")[0] in (*sys.stdlib_module_names, "numpy")


def names_of_program(tests: str) -> tuple[set[str], set[str]]:
    """Return the global names that tests use and do not define, and which of these they use as modules only.

    Raises:
        SyntaxError: the tests are not Python.

    """
    nodes = list(ast.walk(ast.parse(tests)))
    scopes = [symtable.symtable(tests, "tests", "exec")]
    used: set[str] = set()
    defined: set[str] = set()
    for scope in scopes:
        scopes += scope.get_children()
        for symbol in scope.get_symbols():
            if scope.get_type() == "module" or symbol.is_global():
                (defined if symbol.is_assigned() or symbol.is_imported() else used).add(symbol.get_name())
    loads = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    bases = [n.value.id for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)]
    used = {name for name in used - defined if not name.startswith("__")}
    return used, {n for n in used if is_own_module(_ALIASES.get(n, n)) and loads.count(n) == bases.count(n)}


def judge(connection: BinaryIO, tests: str) -> str:
    """Run tests against the program at the other end; return why they cannot be run so, an empty text if they passed.

    The program defines the names that the tests neither define nor import. Python's own names and modules stay the
    judge's, unless the tests use no others and the program defines one of these.

    Raises:
        BaseException: a test failed.

    """
    module: dict[str, Any] = {"__name__": "__main__"}
    peer = Peer(connection, module, is_judge=True)
    try:
        used, modules = names_of_program(tests)
        found = used & {*map(str, peer.ask("names", *sorted(used)))}
        own = {name for name in found if hasattr(builtins, name) or name in modules}
        stars = any(isinstance(node, ast.alias) and node.name == "*" for node in ast.walk(ast.parse(tests)))
        if (found if stars else used) - modules <= set(dir(builtins)):  # such as `assert sum(1, 2) == 3`
            theirs = own - modules or own
            if len(theirs) > 1:
                return f"the tests use no names of the program's but Python's own: {', '.join(sorted(theirs))}"
            own -= theirs
        peer.copy_globals(sorted(found - own))
        others = [*peer.stand_ins.values()]
        peer.data = [name for name in sorted(found - own) if not any(module.get(name) is one for one in others)]
        for name in modules & own:
            module[name] = importlib.import_module(_ALIASES.get(name, name))
        exec(compile(tests, "tests", "exec"), module)  # noqa: S102 - this is what it is for
    except UnsupportedTests as error:
        return str(error)
    return ""
