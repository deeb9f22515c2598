"""Types that the package tells to editors and checkers: those of the compiled module are what it has, and public
functions have all of theirs.

Run with `python tests/python/main.py stub_test`.
"""

import ast
import fnmatch
import inspect
import pathlib
import tomllib
import typing
import unittest

import dovetail
from dovetail import _C, ragged

PACKAGE = pathlib.Path(dovetail.__file__).parent
STUB = PACKAGE / "_C.pyi"
NUMBERS = {"typing.SupportsInt | typing.SupportsIndex": "int", "typing.SupportsFloat | typing.SupportsIndex": "float"}


def spelled(annotation: ast.expr | None) -> str:
    """A type as the stub spells it; pybind11 names modules, and whatever it converts to a number."""
    text = ast.unparse(annotation) if annotation else "nothing"
    for long, short in NUMBERS.items():
        text = text.replace(long, short)
    for module in ("dovetail._C.", "collections.abc.", "torch.distributed.distributed_c10d."):
        text = text.replace(module, "")
    return text


def signature(node: ast.FunctionDef) -> str:
    """Arguments with types and defaults, then what is returned. Those that callers cannot name have numbers, as
    pybind11 has it."""
    positional = node.args.posonlyargs + node.args.args
    at = int(bool(positional) and positional[0].arg == "self")
    unnamed = [a for a in node.args.posonlyargs if a.arg != "self"]
    said = [f"arg{i}: {spelled(a.annotation)}" for i, a in enumerate(unnamed)]
    said += [f"{a.arg}: {spelled(a.annotation)}" for a in positional[at + len(unnamed):]]
    defaults = [ast.unparse(d) for d in node.args.defaults]
    said = [f"{a} = {d}" if d else a for a, d in zip(said, [""] * (len(said) - len(defaults)) + defaults)]
    return f"({', '.join(said)}) -> {spelled(node.returns)}"


def of_stub(nodes: list[ast.stmt]) -> dict:
    """Name -> signature of a function, type of an attribute, or such a dict of a class."""
    found: dict = {}
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = f"read only {spelled(node.returns)}" if node.decorator_list else signature(node)
        elif isinstance(node, ast.AnnAssign):
            found[node.target.id] = spelled(node.annotation)
        elif isinstance(node, ast.ClassDef):
            found[node.name] = {"bases": [ast.unparse(b) for b in node.bases], **of_stub(node.body)}
    return found


def documented(text: str, name: str = "f") -> ast.FunctionDef:
    """What pybind11's first line of a docstring says, "name(self: T, arg0: int) -> int"."""
    return ast.parse(f"def {name}{text.strip().splitlines()[0].removeprefix(name)}: ...").body[0]


def of_module(values: dict) -> dict:
    found: dict = {}
    for name, value in values.items():
        if inspect.isclass(value):
            bases = [b.__name__ for b in value.__bases__ if b.__name__ != "pybind11_object"]
            members = {} if issubclass(value, Exception) else of_module(vars(value))
            found[name] = {"bases": bases, **members}
        elif isinstance(value, property):
            kind = spelled(documented(value.fget.__doc__).returns)
            found[name] = kind if value.fset else f"read only {kind}"
        elif inspect.isroutine(value) and (value.__doc__ or "").startswith(f"{name}("):  # an __init__ that is none: not
            found[name] = signature(documented(value.__doc__, name))
    return found


def agree(stub: object, module: object) -> bool:
    """Where the module takes any object, such as something to call, the stub says what it is for."""
    if isinstance(stub, str) and isinstance(module, str) and ": object" in module:
        mine, theirs = (ast.parse(f"def f{text}: ...").body[0] for text in (stub, module))
        for a, b in zip(mine.args.args, theirs.args.args):
            if ast.unparse(b.annotation) == "object":
                a.annotation = b.annotation
        return ast.unparse(mine) == ast.unparse(theirs)
    return stub == module


def flat(name: str, found: dict) -> dict:
    value = found.get(name, {})
    return {f"{name}.{member}": v for member, v in value.items()} if isinstance(value, dict) else {name: value}


def public() -> typing.Iterator[tuple[str, typing.Callable]]:
    """All functions and methods that users call."""
    for module in (dovetail, dovetail.checkpoint, dovetail.nn, dovetail.optim, ragged):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isfunction(value):
                yield name, value
            elif inspect.isclass(value):
                for base in value.__mro__:
                    for method, f in vars(base).items() if base.__module__.startswith("dovetail.") else ():
                        if inspect.isfunction(f) and (method == "__init__" or not method.startswith("_")):
                            yield f"{base.__name__}.{method}", inspect.unwrap(f)


class Stub(unittest.TestCase):
    maxDiff = None

    def test_it_says_what_the_module_has(self):
        stub, module = of_stub(ast.parse(STUB.read_text()).body), of_module(vars(_C))
        self.assertGreater(len(module), 20)
        for name in sorted(stub.keys() | module.keys()):
            said, has = flat(name, stub), flat(name, module)
            for member in sorted(said.keys() | has.keys()):
                with self.subTest(member):
                    mine, its = (found.get(member, "not there") for found in (said, has))
                    self.assertTrue(agree(mine, its), f"_C.pyi says: {mine}; the module: {its}")

    def test_it_is_installed(self):
        with open(PACKAGE.parents[1] / "pyproject.toml", "rb") as file:
            setuptools = tomllib.load(file)["tool"]["setuptools"]
        for file in PACKAGE.iterdir():
            if file.suffix not in (".py", ".so", "") or file.name == "py.typed":  # CMake installs the module itself
                patterns = setuptools["package-data"]["dovetail"]
                self.assertTrue(any(fnmatch.fnmatch(file.name, p) for p in patterns), file.name)
        folders = {".".join(f.parent.relative_to(PACKAGE.parent).parts) for f in PACKAGE.rglob("__init__.py")}
        self.assertEqual(folders, set(setuptools["packages"]))
        self.assertTrue((PACKAGE / "py.typed").exists())


class Annotations(unittest.TestCase):
    def test_public_functions_have_all(self):
        found = dict(public())
        self.assertGreater(len(found), 40)
        for name, f in found.items():
            with self.subTest(name):
                signed = inspect.signature(f)
                missing = [p.name for p in signed.parameters.values() if p.annotation is p.empty and p.name != "self"]
                self.assertEqual(missing, [])
                self.assertTrue(name.endswith("__init__") or signed.return_annotation is not signed.empty)
                typing.get_type_hints(f)  # names in them mean something


if __name__ == "__main__":
    unittest.main()
