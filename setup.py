"""Builds dovetail._C with CMake; pyproject.toml says the rest."""

import os
import subprocess
import sys

import torch
from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

ROOT = os.path.dirname(os.path.abspath(__file__))


class BuildWithCMake(build_py):
    def run(self):
        folder = os.environ.get("BUILD_DIR", os.path.join(ROOT, "build", "pip"))
        if not os.path.exists(os.path.join(folder, "build.ninja")):
            subprocess.check_call(["cmake", "-S", ROOT, "-B", folder, "-G", "Ninja",
                                   f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}",
                                   f"-DPython3_EXECUTABLE={sys.executable}", "-DDOVETAIL_PYTHON_ONLY=ON"])
        subprocess.check_call(["cmake", "--build", folder, "--target", "dovetail_python", "-j", "2"])
        super().run()


class Native(Distribution):
    def has_ext_modules(self):  # the wheel is of this platform and interpreter
        return True


setup(cmdclass={"build_py": BuildWithCMake}, distclass=Native)
