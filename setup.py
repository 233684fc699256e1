"""Build the C++ kernels. They are optional: without a compiler the package installs and runs on torch alone."""

import os
import platform
from glob import glob

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

# -ffp-contract=off: the wire format defines every rounding, so a*b+c must stay two operations.
# No -march: instruction sets are chosen at run time, per function.
FLAGS = ["-O3", "-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-Wall"]
OPENMP = [] if platform.system() == "Darwin" else ["-fopenmp"]


class BuildKernels(build_ext):
    """Builds a plain shared library: it is loaded by ctypes and knows nothing of Python."""

    def get_ext_filename(self, name: str) -> str:
        return os.path.join(*name.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except (CompileError, LinkError):
            # some compilers come without OpenMP; one thread is better than none
            ext.extra_compile_args, ext.extra_link_args = FLAGS, []
            super().build_extension(ext)


class AnyPython(bdist_wheel):
    """One wheel per platform serves every Python 3: the kernels do not link against the interpreter."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": AnyPython},
    ext_modules=[
        Extension(
            "lowcomm.compress._kernels",
            sources=sorted(glob("compress/*.cpp")),
            depends=sorted(glob("compress/*.h") + glob("cuda/*.cuh")),
            include_dirs=["compress", "cuda"],
            extra_compile_args=FLAGS + OPENMP,
            extra_link_args=OPENMP,
            language="c++",
            optional=True,
        )
    ],
)
