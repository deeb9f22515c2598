"""A wheel of the package, installed where there is torch, what torch requires, and nothing else: it must be whole.

Run with `BUILD_DIR=build python tests/python/main.py wheel_test`; the extension in that folder is packed. Uses no
network: torch and its requirements are linked from the interpreter that runs the test.
"""

import email
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import unittest
import zipfile
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from examples_test import EXAMPLES, finish

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = ROOT / "python" / "dovetail"
EXTENSION = "_C" + sysconfig.get_config_var("EXT_SUFFIX")
# Nothing of the caller's that would lead an interpreter or the loader elsewhere.
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIP_", "LD_", "VIRTUAL_ENV"))}


def closure(name: str) -> set[str]:
    """The distributions that a distribution requires, itself among them, as their metadata say."""
    found, wanted = set(), [name]
    while wanted:
        name = canonicalize_name(wanted.pop())
        if name not in found:
            found.add(name)
            needs = map(Requirement, metadata.requires(name) or ())
            wanted += [r.name for r in needs if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


def link(names: set[str], packages: pathlib.Path) -> None:
    """Makes installed distributions importable from another folder of packages."""
    for name in names:
        home = pathlib.Path(metadata.distribution(name).locate_file(""))
        for top in {f.parts[0] for f in metadata.files(name)} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(home / top)


def dynamic(library: pathlib.Path, kind: str) -> list[str]:
    """What a library's dynamic section says of a kind of entry."""
    out = subprocess.run(["readelf", "-d", library], check=True, capture_output=True, text=True).stdout
    return re.findall(rf"\({kind}\).*\[(.*)\]", out)


class Wheel(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="dovetail-wheel-"))
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        # setuptools' own files go here too, not into the source tree.
        settings = cls.folder / "setup.cfg"
        settings.write_text(f"[build]\nbuild_base={cls.folder}/build\n[egg_info]\negg_base={cls.folder}\n")
        pip = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check"]
        cls.run_in(ROOT, *pip, "wheel", ".", "--no-build-isolation", "--no-deps", "--no-index", "-w",
                   cls.folder / "out", DIST_EXTRA_CONFIG=str(settings), BUILD_DIR=os.environ["BUILD_DIR"])
        cls.wheel, = (cls.folder / "out").iterdir()
        with zipfile.ZipFile(cls.wheel) as archive:
            cls.files = {name: archive.read(name) for name in archive.namelist()}

        cls.venv = cls.folder / "venv"
        cls.run_in(ROOT, sys.executable, "-m", "venv", "--without-pip", cls.venv)
        cls.python = cls.venv / "bin" / "python"
        where = cls.run_in(ROOT, cls.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
        cls.packages = pathlib.Path(where.rstrip("\n"))
        cls.requirements = closure("torch")
        link(cls.requirements, cls.packages)
        # With its dependencies, which must all be there: pip asks no index.
        cls.run_in(ROOT, *pip, "--python", cls.python, "install", "--no-index", cls.wheel)

    @staticmethod
    def run_in(folder: pathlib.Path, *command, **more: str) -> str:
        return finish([str(c) for c in command], ENVIRONMENT | more, str(folder))

    def asked(self, code: str) -> list[str]:
        """Lines that an interpreter of the environment prints."""
        return self.run_in(self.folder, self.python, "-c", code).splitlines()

    def info(self, name: str) -> str:
        found, = (text for path, text in self.files.items() if path.endswith(f".dist-info/{name}"))
        return found.decode()

    def test_it_holds_the_package_and_nothing_else(self):
        kinds = {".py", ".pyi", ".typed"}
        sources = {f"dovetail/{f.relative_to(SOURCES)}": f for f in SOURCES.rglob("*") if f.suffix in kinds}
        self.assertIn("dovetail/py.typed", sources)
        self.assertIn("dovetail/optim/__init__.py", sources)
        packed = {name for name in self.files if not re.match(r"dovetail-[^/]*\.dist-info/", name)}
        fmt, = self.fmt_libraries()
        self.assertEqual(packed, {*sources, f"dovetail/{EXTENSION}", f"dovetail/{fmt}"})
        for name, file in sources.items():
            self.assertEqual(self.files[name], file.read_bytes(), name)

    def fmt_libraries(self) -> list[str]:
        """What the extension needs beside torch and what every Linux has, by name."""
        return [n for n in dynamic(self.packages / "dovetail" / EXTENSION, "NEEDED") if n.startswith("libfmt.so.")]

    def test_metadata(self):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        said = email.message_from_string(self.info("METADATA"))
        self.assertEqual(said["Name"], project["name"])
        self.assertEqual(said["Version"], project["version"])
        self.assertEqual(said["Requires-Python"], project["requires-python"])
        self.assertEqual(said.get_all("Requires-Dist"), project["dependencies"])
        licences = {f.name for f in ROOT.iterdir() if re.match("LICEN[CS]E|COPYING|NOTICE", f.name)}
        self.assertEqual({pathlib.Path(name).name for name in self.files if "/licenses/" in name}, licences)

        version = f"cp{sys.version_info.major}{sys.version_info.minor}"
        tag = f"{version}-{version}-{re.sub('[-.]', '_', sysconfig.get_platform())}"
        self.assertTrue(tag.split("-")[2].startswith("linux_"), tag)
        self.assertEqual(self.wheel.name, f"dovetail-{project['version']}-{tag}.whl")
        said = email.message_from_string(self.info("WHEEL"))
        self.assertEqual((said["Tag"], said["Root-Is-Purelib"]), (tag, "false"))

    def test_the_environment_is_bare(self):
        """Else what follows would show nothing."""
        names = set(self.asked("from importlib import metadata as m; [print(d.name) for d in m.distributions()]"))
        self.assertEqual({canonicalize_name(n) for n in names}, self.requirements | {"dovetail"})
        path = self.asked("import sys; print(*sys.path, sep='\\n')")
        self.assertIn(str(self.packages), path)
        for elsewhere in (SOURCES.parent, sysconfig.get_path("purelib")):
            self.assertNotIn(str(elsewhere), path)

    def test_import(self):
        code = "import dovetail, dovetail._C, torch; [print(m.__file__) for m in (dovetail, dovetail._C, torch)]"
        files = [self.packages / "dovetail/__init__.py", self.packages / "dovetail" / EXTENSION,
                 self.packages / "torch/__init__.py"]
        self.assertEqual(self.asked(code), [str(f) for f in files])

    def test_the_extension_finds_its_libraries_beside_it(self):
        library = self.packages / "dovetail" / EXTENSION
        self.assertEqual(dynamic(library, "R(?:UN)?PATH"), ["$ORIGIN:$ORIGIN/../torch/lib"])
        self.assertIn("libtorch_python.so", dynamic(library, "NEEDED"))
        # Without torch having been imported before.
        maps = self.asked(f"import ctypes; ctypes.CDLL({str(library)!r}); print(open('/proc/self/maps').read())")
        loaded = {line.split()[-1] for line in maps if "libfmt" in line}
        self.assertEqual(loaded, {str(self.packages / "dovetail" / name) for name in self.fmt_libraries()})

    def test_an_example_trains_on_two_ranks(self):
        script = shutil.copy(EXAMPLES / "fsdp2_swap.py", self.folder)
        out = self.run_in(self.folder, self.python, "-m", "torch.distributed.run", "--standalone",
                          "--nproc_per_node=2", script)
        losses = [float(x) for x in re.findall(r"^step +\d+ +loss (\d+\.\d+)", out, re.MULTILINE)]
        self.assertEqual(len(losses), 4, out)
        self.assertLess(losses[-1], losses[0], out)
        self.assertLess(losses[-1], 2.9)  # nats: 5.5 untrained, 3.16 from the bytes' frequencies alone


if __name__ == "__main__":
    unittest.main()
