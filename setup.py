"""Build the C++ kernels. They are optional: without a compiler the package installs and runs on torch alone."""

import platform
from glob import glob

from setuptools import Extension, setup

# -ffp-contract=off: the wire format defines every rounding, so a*b+c must stay two operations.
# No -march: instruction sets are chosen at run time, per function.
FLAGS = ["-O3", "-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-Wall"]
OPENMP = [] if platform.system() == "Darwin" else ["-fopenmp"]

setup(
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
    ]
)
