"""Builds dovetail._C with CMake; pyproject.toml says the rest."""

import os
import shutil
import subprocess
import sys

import torch
from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

ROOT = os.path.dirname(os.path.abspath(__file__))
NEEDS = {"cmake": "cmake", "ninja": "ninja-build"}  # programs, and the Debian packages that have them


class BuildWithCMake(build_py):
    def run(self):
        folder = os.environ.get("BUILD_DIR", os.path.join(ROOT, "build", "pip"))
        if not os.path.exists(os.path.join(folder, "build.ninja")):
            configure(folder)
        subprocess.check_call(["cmake", "--build", folder, "--target", "dovetail_python", "-j", "2"])
        if self.editable_mode:  # the module is used where it was built
            super().run()
            return
        target = os.path.abspath(self.build_lib)
        shutil.rmtree(os.path.join(target, "dovetail"), ignore_errors=True)  # what an earlier version left there
        super().run()
        # Not a copy: installed, the module finds torch relative to itself.
        subprocess.check_call(["cmake", "--install", folder, "--component", "python", "--strip", "--prefix", target])


def configure(folder):
    missing = [package for program, package in NEEDS.items() if not shutil.which(program)]
    if missing:
        sys.exit(f"dovetail: these Debian packages are missing: {' '.join(missing)}; tools/setup installs all it needs")
    answer = subprocess.run(["cmake", "-S", ROOT, "-B", folder, "-G", "Ninja",
                             f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}",
                             f"-DPython3_EXECUTABLE={sys.executable}", "-DDOVETAIL_PYTHON_ONLY=ON"])
    if answer.returncode:
        sys.exit("dovetail: CMake could not configure, and said above what it did not find; tools/setup installs the "
                 "Debian packages that have it")


class Native(Distribution):
    def has_ext_modules(self):  # the wheel is of this platform and interpreter
        return True


setup(cmdclass={"build_py": BuildWithCMake}, distclass=Native)
